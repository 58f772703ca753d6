"""`voltriton doctor`: what was found on this machine, what is needed, why, and how to fix it.

host      the machine, or a recording of it     box       what several checks share
rows      a row, and the list of checks         checks_*  the checks
fatbin    GPU code inside a shared library      smi       nvidia-smi's outputs
report    text and JSON                         troubles  the troubles table
thermal   the sampler for Prometheus (a program of its own: python -m voltriton.doctor.thermal)
"""

from voltriton.doctor.command import main

__all__ = ["main"]

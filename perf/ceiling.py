#!/usr/bin/env python3
"""Triton's own ceiling: decoupled responses a second through the Python backend, with no model behind.

perf/ceiling.py --streams 1 8 32
"""

import sys

from voltriton_perf.ceiling import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

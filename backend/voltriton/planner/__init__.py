"""`voltriton plan`: does a model fit on given cards, how many tokens, and what to change if not.

files     config.json and the headers of the safetensors files (no weights are read)
layout    the weights of an architecture: shape, how a rank's share is cut, which part they belong to
cache     bytes of the KV cache and of recurrent state, by vLLM 0.32's block rules
cards     memory and bandwidth of the cards
memory    the plan itself: bytes a rank by part, tokens, sequences
roofline  tokens/s that the memory bandwidth allows
advice    the smallest changes that make it fit; profiles
command   the command line
"""

from voltriton.planner.command import main

__all__ = ["main"]

"""Kernels for Volta (compute capability 7.0): NVFP4 linear layers and experts, and the glue around them.

`ops` holds the public functions. Nothing here but `backend` and `switch` imports vLLM, so the room can be
used and tested alone.
"""

"""vLLM behind the service's `Engine`: the only room of the backend that imports vLLM.

Written for vLLM 0.32.0; `builds` has what other builds do otherwise. vLLM is imported inside functions, so that the
environment (devices, threads, offline mode) is settled before the first import.
"""

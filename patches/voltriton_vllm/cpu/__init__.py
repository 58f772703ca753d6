"""The NVFP4 kernel for CPUs: built once with the machine's compiler, kept in a cache folder."""

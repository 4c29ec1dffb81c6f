"""Kernels for CPUs: C++ over ctypes, each with a twin in `baton_engine.kernels.reference`."""

"""Kernels for GPUs, in Triton, each with a twin in plain torch."""

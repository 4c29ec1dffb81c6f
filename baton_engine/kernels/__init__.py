"""Kernels: one file each, with a checked wrapper and a pure-torch twin in reference.py."""

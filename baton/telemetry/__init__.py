"""Structured logs and the base of every package's `metrics.py`."""

"""Benchmarks: each is `python -m bench.NAME [--json FILE]`."""

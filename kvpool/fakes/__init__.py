"""In-memory stand-ins of the pool, for tests and benchmarks."""

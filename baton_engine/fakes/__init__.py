"""An engine without a model and a pool without memory, for tests and benchmarks; not in the wheel."""

"""The demo model: a tiny Llama that knows the first sentences of Python's own docstrings."""

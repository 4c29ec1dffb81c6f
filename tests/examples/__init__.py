"""The examples of `examples/`, run as their users would run them."""

"""Stand for the router's parts in tests; not in the wheel."""

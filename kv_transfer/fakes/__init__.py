"""Stand for transfer backends in tests; not in the wheel."""

"""Which block goes first when a tier of a pool node is full."""

"""The pure cores of the hand-off: what each side has promised, and when pages may be written and freed."""

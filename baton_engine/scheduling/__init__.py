"""What runs in the next step. Pure: no torch, no clock."""

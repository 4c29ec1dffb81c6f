"""How the demo model is trained and asked; not in the wheel, which has only the model."""

"""Text into tokens and back."""

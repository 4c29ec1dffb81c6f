"""Other serving engines, measured beside ours in one run."""

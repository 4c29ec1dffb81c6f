"""How near the engine comes to what a GPU can do."""

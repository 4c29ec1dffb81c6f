"""Model definitions and the loading of Hugging Face checkpoints."""

"""Chat templates: conversations into the text that a model was trained to read."""

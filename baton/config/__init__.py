"""Configuration: frozen dataclasses (`schema`), filled from file < environment < flags (`load`)."""

"""Composition root: command line, launchers, roles."""

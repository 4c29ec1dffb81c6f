"""The operators' HTTP surface, on a port and with keys of its own."""

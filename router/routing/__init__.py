"""Which workers serve a request. Pure."""

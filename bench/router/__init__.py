"""What measures a router: its core without sockets, workers without an engine, streaming clients."""

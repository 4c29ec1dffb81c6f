"""gRPC between Baton's processes: generated stubs, conversions at the edge, channels and servers."""

"""The control messages of hand-offs between two workers: handshake, heartbeats,
and the connection to the peer's region.
"""

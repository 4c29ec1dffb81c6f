"""Tells whether a process listens at a Unix socket, before another one binds there."""

import socket


def is_served(path: str) -> bool:
    """Whether one does; a killed one leaves a file at which none does. Does not block."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # as many wait to be let in as may, or nobody can be here
            return True
    return True

"""A redis-server of a benchmark's own, on a free port of the loopback, without persistence."""

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.harness.stopping import stoppable


@contextmanager
def redis_server(directory: Path) -> Iterator[str]:
    """Yields its URL; the server ends with the block.

    Raises:
        RuntimeError: It ended before it answered.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory)]
    command += ["--save", "", "--appendonly", "no", "--daemonize", "no"]
    with stoppable():
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            if not any("Ready to accept" in line for line in process.stdout):
                raise RuntimeError("redis-server did not start")
            yield f"redis://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.communicate()

"""Starts `baton serve` as a user would, and stops it."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_READY = re.compile(r"ready on (http://\S+)")


@contextmanager
def serving(
    model: str,
    *flags: str,
    settings: Mapping[str, str] | None = None,
    module: str = "baton_cluster.cli.main",
    python: str = sys.executable,
) -> Iterator[str]:
    """A cluster serving `model` under the name `bench` on a free port; yields its URL.

    Args:
        model: A directory.
        flags: Of `baton serve`.
        settings: Variables of its environment.
        module: That of the command line.
        python: Of the environment that runs it.

    Raises:
        RuntimeError: It ended before it was ready; what it printed is in the message.
    """
    command = [python, "-m", module, "serve", model, "--port", "0"]
    command += ["--served-model-name", "bench", "--log-level", "warning", *flags]
    process = subprocess.Popen(
        command,
        env=os.environ | (settings or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    # Asked to stop, a benchmark takes its cluster along.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield _wait_ready(process)
    finally:
        signal.signal(signal.SIGTERM, before)
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()  # its workers notice, and leave
            process.communicate()
            raise


def _wait_ready(process: subprocess.Popen[str]) -> str:
    printed: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        printed.append(line)
        if found := _READY.search(line):
            return found.group(1)
    raise RuntimeError("the cluster did not start:\n" + "".join(printed[-20:]))

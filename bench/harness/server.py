"""Starts `baton serve` as a user would, and stops it."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bench.harness.stopping import stoppable

_READY = re.compile(r"ready on (http://\S+)\s")
_LOOK_S = 0.05

WITH_HAND_OFF = {"BATON_ROUTER_LOCAL_PREFILL_TOKENS": "0"}
"""Settings by which no decode worker computes a prompt, however short: each request of a pair has a hand-off."""


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
    # Into a file: a pipe that nobody reads holds a cluster up once it is full.
    with stoppable(), tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        log = Path(folder) / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                env=os.environ | (settings or {}),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            yield _wait_ready(process, log)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()  # its workers notice, and leave
                process.wait()
                raise


def _wait_ready(process: "subprocess.Popen[bytes]", log: Path) -> str:
    while True:
        ended = process.poll() is not None
        printed = log.read_text(errors="replace")
        if found := _READY.search(printed):
            return found.group(1)
        if ended:
            last = "\n".join(printed.splitlines()[-20:])
            raise RuntimeError(f"the cluster did not start:\n{last}")
        time.sleep(_LOOK_S)

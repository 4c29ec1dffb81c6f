"""The running server held to its own description by schemathesis, through its command line as anybody would run it."""

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.router.served import listening, serve

EXCUSED = {
    # Whether a prompt fits the context, or a token the vocabulary, depends on the model: no schema can say it.
    "positive_data_acceptance",
}
"""Checks that are left out, and why. Everything else that schemathesis knows is on."""


CONFIG = """
[checks.negative_data_rejection]
# 413 besides those of the tool itself: a list that is longer than allowed may make its body larger than allowed.
expected-statuses = [400, 401, 403, 404, 405, 406, 409, 413, 415, 422, 428, 429, "5xx"]
"""


@contextmanager
def served_url() -> Iterator[str]:
    """The application over a scripted generator, on a loopback port, in a thread with a loop of its own."""
    loop = asyncio.new_event_loop()
    ready, stop = threading.Event(), asyncio.Event()
    urls: list[str] = []

    async def run() -> None:
        async with serve() as served, listening(served.app) as url:
            served.says("hello world", "another")
            urls.append(url)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    ready.wait(60)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()


def run_schemathesis(url: str, directory: Path, *, phases: str, examples: int) -> dict[str, object]:
    """One run over every operation; its report, after asserting that nothing was found."""
    report, config = directory / "report.json", directory / "schemathesis.toml"
    config.write_text(CONFIG)
    command = [str(Path(sys.executable).with_name("schemathesis"))]
    command += [f"--config-file={config}", "run", f"{url}/openapi.json"]
    command += ["--phases", phases, "--max-examples", str(examples), "--generation-deterministic"]
    command += [
        "--exclude-checks",
        ",".join(sorted(EXCUSED)),
        "--no-color",
        "--continue-on-failure",
    ]
    command += ["--report-json-path", str(report), "--request-timeout", "60"]
    done = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, check=False, timeout=3500
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    found: dict[str, object] = json.loads(report.read_text())
    return found


@pytest.mark.timeout(600)
def test_every_operation_keeps_to_the_description(tmp_path: Path) -> None:
    with served_url() as url:
        run_schemathesis(url, tmp_path, phases="examples,fuzzing", examples=3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_operation_keeps_to_the_description_also_at_the_bounds_of_each_field(
    tmp_path: Path,
) -> None:
    with served_url() as url:
        run_schemathesis(url, tmp_path, phases="examples,coverage,fuzzing", examples=50)

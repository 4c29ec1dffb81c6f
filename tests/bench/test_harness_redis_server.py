import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.waits import eventually

STANDS_IN = f"""#!{sys.executable}
import os, time
print(os.getpid(), file=open("redis.pid", "w"))
print("Ready to accept connections", flush=True)
time.sleep(600)
"""
BENCHMARK = """
import pathlib, time
from bench.harness.redis_server import redis_server
with redis_server(pathlib.Path.cwd()) as url:
    print(url, flush=True)
    time.sleep(600)
"""


def test_a_benchmark_that_is_asked_to_stop_takes_its_redis_along(tmp_path: Path) -> None:
    program = tmp_path / "redis-server"
    program.write_text(STANDS_IN)
    program.chmod(0o755)
    root = str(Path(__file__).resolve().parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", BENCHMARK],
        cwd=tmp_path,
        env=os.environ | {"PATH": str(tmp_path), "PYTHONPATH": root},
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b"redis://")
    redis = int((tmp_path / "redis.pid").read_text())
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    eventually(lambda: not psutil.pid_exists(redis))

import subprocess
import sys

import pytest

CODE = """
import os, sys
from pathlib import Path
from baton_cluster.launch.command_line import show_as
environment = Path("/proc/self/environ").read_bytes()
show_as(*os.environ["SHOWN"].split())
assert Path("/proc/self/environ").read_bytes() == environment
assert sys.argv[1:] == ["standby", "--name", "a-name-that-is-long"]
sys.stdout.buffer.write(Path("/proc/self/cmdline").read_bytes())
"""


@pytest.mark.parametrize(
    ("shown", "kept"),
    [
        ("decode --name decode-0", ["decode", "--name", "decode-0"]),
        ("prefill --name " + "x" * 100, ["prefill", "--name", "x" * 19]),
    ],
)
def test_other_arguments_are_shown_in_place_of_those_that_it_was_started_with(shown, kept):
    arguments = ("-c", CODE, "standby", "--name", "a-name-that-is-long")
    told = subprocess.run(
        [sys.executable, *arguments],
        env={"SHOWN": shown},
        capture_output=True,
        check=True,
        timeout=30,
    ).stdout
    command, *rest = told.rstrip(b"\0").split(b"\0")
    assert command.decode() == sys.executable
    assert [one.decode() for one in rest] == ["-c", CODE, *kept]

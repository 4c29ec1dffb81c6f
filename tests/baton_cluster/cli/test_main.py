import argparse
import asyncio
import contextlib
import io
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from baton.errors import UnavailableError
from baton.ids import Incarnation
from baton_cluster.cli import demo
from baton_cluster.cli.demo import Outcome
from baton_cluster.cli.flags import add_flags, given_settings
from baton_cluster.cli.main import main
from baton_cluster.cli.progress import StartDisplay
from baton_cluster.launch.child_stories import ask_story
from baton_cluster.launch.launcher import ChildInfo
from baton_cluster.launch.supervisor import (
    AnnounceReady,
    AnnounceRestart,
    ChildProgress,
    ChildState,
)
from tests.baton_cluster.cli.fake_control import FakeControl, answering
from tests.baton_cluster.cli.test_chat import TIMING
from tests.waits import WAIT_S


def error_of(capsys, *argv: str) -> tuple[int, str]:
    try:
        status = main(argv)
    except SystemExit as stop:
        status = int(stop.code or 0)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("baton: error: ")
    assert shown.err.count("\n") == 1
    return status, shown.err.removeprefix("baton: error: ").rstrip()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve", "--port", "abc"], "--port: expected int, got 'abc'"),
        (["serve", "--port", "70000"], "--port: must be from 0 to 65535, not 70000"),
        (["serve", "--block-size", "24"], "--block-size: must be a power of two"),
        (["serve", "--kv-cache-memory-bytes", "lots"], "--kv-cache-memory: expected a size"),
        (["serve", "--dtype", "int4"], "--dtype: must be auto, float32, float16 or bfloat16"),
        (["serve", "--policy", "x"], "--policy: must be predictive, prefix_affinity"),
        (["serve", "--prefill-workers", "0"], "the cluster needs a prefill and a decode worker"),
        (["serve", "-f", "/absent.yaml"], "/absent.yaml: no such file or directory"),
        (["serve", "--runtime-dir", "/" + "x" * 120], "too long for a Unix socket"),
        (["serve", "--host", "192.0.2.1"], "192.0.2.1 is no address of this machine"),
        (["serve", "--prot", "1"], "unrecognized arguments: --prot (see baton serve --help)"),
        (["config", "show", "-x"], "unrecognized arguments: -x (see baton config show --help)"),
        (["sevre"], "invalid choice: 'sevre'"),
        ([], "the following arguments are required: COMMAND"),
        (["status", "--port", "x"], "argument --port: invalid int value: 'x'"),
    ],
)
def test_a_wrong_command_is_one_line_and_status_2(capsys, argv, message):
    status, shown = error_of(capsys, *argv)
    assert status == 2
    assert message in shown


@pytest.mark.parametrize("flag", ["--served-model-name", "--api-key"])
@pytest.mark.parametrize("model", ["/models/x", "owner/x", "gpt2"])
def test_a_model_behind_a_flag_of_many_values_is_not_taken_for_one_of_them(capsys, flag, model):
    status, shown = error_of(capsys, "serve", flag, "mine", model)
    assert status == 2
    assert f"give MODEL before {flag}" in shown


@pytest.mark.parametrize(
    "argv",
    [
        ["/absent", "--served-model-name", "a", "b", "--api-key", "k1", "k2"],
        ["--served-model-name", "a", "b", "--device", "cpu", "/absent"],
        ["--api-key", "k1", "--", "/absent"],
    ],
)
def test_a_flag_takes_many_values_where_model_is_given(capsys, argv):
    assert error_of(capsys, "serve", *argv) == (1, "/absent: no such directory")


@pytest.mark.parametrize("in_file", [True, False])
def test_a_flag_takes_many_values_where_the_file_or_the_environment_names_the_model(
    capsys, tmp_path: Path, monkeypatch, in_file
):
    argv = ["--served-model-name", "a", "b"]
    if in_file:
        (tmp_path / "c.yaml").write_text("model: {model: /absent}")
        argv += ["-f", str(tmp_path / "c.yaml")]
    else:
        monkeypatch.setenv("BATON_MODEL_MODEL", "/absent")
    assert error_of(capsys, "serve", *argv) == (1, "/absent: no such directory")


@pytest.mark.parametrize("words", [("a", "b", "c"), ("a", "b", "--served-model-name", "c")])
def test_a_flag_given_again_adds_its_values(words):
    parser = argparse.ArgumentParser()
    add_flags(parser)
    given = given_settings(parser.parse_args(["--served-model-name", *words]))
    assert [(setting.path, setting.value) for setting in given] == [
        ("model.served_model_name", ["a", "b", "c"])
    ]


def test_a_model_that_is_not_there_is_one_line_and_status_1(capsys):
    assert error_of(capsys, "serve", "/absent") == (1, "/absent: no such directory")


def test_a_taken_port_is_one_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, shown = error_of(capsys, "serve", "--port", port)
    assert status == 2
    assert shown.startswith(f"port {port} on 127.0.0.1 is taken")


def test_the_environment_is_read_and_checked(capsys, monkeypatch):
    monkeypatch.setenv("BATON_ENGINE_BLOCK_SIZE", "7")
    status, shown = error_of(capsys, "serve")
    assert status == 2
    assert shown.startswith("BATON_ENGINE_BLOCK_SIZE: must be a power of two")


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert re.fullmatch(r"baton \d+\.\d+\.\d+\n", capsys.readouterr().out)


HEARS_HANG_UPS = ("env", "--default-signal=HUP")
"""Also where the tests were started by nohup."""


@contextlib.contextmanager
def serve_fakes(
    home, *argv: str, under: Sequence[str] = HEARS_HANG_UPS
) -> Iterator[subprocess.Popen[str]]:
    """`baton serve` with children that only pretend; prints to one stream. It has ended behind this."""
    code = (
        "import sys, functools, baton_cluster.cli.serve as serve, baton_cluster.cli.main as cli;"
        "serve.LocalCluster = functools.partial("
        "serve.LocalCluster, child_module='tests.baton_cluster.fake_role');"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    command = [*under, sys.executable, "-c", code, "serve", *argv, "--port", "0"]
    command += ["--runtime-dir", str(home / "run")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def until_ready(process: subprocess.Popen[str]) -> list[str]:
    """What it printed up to the line that says that it is ready."""
    assert process.stdout is not None
    lines: list[str] = []
    while not lines or "ready" not in lines[-1]:
        lines.append(process.stdout.readline())
        assert lines[-1], f"ended before it was ready: {lines}"
    return lines


def test_serve_prints_one_line_when_ready_and_stops_on_sigterm(home):
    with serve_fakes(home, "none", "--served-model-name", "tiny") as process:
        assert process.stdout is not None
        lines = until_ready(process)
        ready = r"baton: ready on http://127\.0\.0\.1:\d+ \(model tiny, 1 prefill \+ 1 decode\)\n"
        assert re.fullmatch(ready, lines[-1])
        assert "baton: decode-0: loading weights\n" in lines
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == ""
        assert process.wait(30) == 0
    assert not (home / "run").exists()


def test_a_closed_terminal_stops_it(home):
    with serve_fakes(home) as process:
        until_ready(process)
        process.send_signal(signal.SIGHUP)
        assert process.wait(30) == 0


def test_a_closed_terminal_does_not_stop_what_nohup_started(home):
    with serve_fakes(home, under=["nohup"]) as process:
        port = int(until_ready(process)[-1].split("127.0.0.1:")[1].split()[0])
        process.send_signal(signal.SIGHUP)
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", port), WAIT_S) as router:
                assert router.makefile().readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def shell(words: str) -> tuple[str, ...]:
    """Starts a command as a shell does that is told these words, of which `"$@"` is that command."""
    return ("sh", "-c", words, "sh")


async def router_is_ready(directory: Path) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            with contextlib.suppress(UnavailableError):  # it does not listen yet
                told = await ask_story(directory, "router")
                if any(entry.event.startswith("ChildReady") for entry in told.entries):
                    return
            await asyncio.sleep(0.01)


def test_it_serves_with_its_streams_closed_and_gives_their_descriptors_to_no_file(home):
    with serve_fakes(home, under=shell('exec "$@" <&- >&- 2>&-')) as process:
        asyncio.run(router_is_ready(home / "run"))
        for one in (process.pid, *(child.pid for child in psutil.Process(process.pid).children())):
            streams = [os.readlink(f"/proc/{one}/fd/{number}") for number in range(3)]
            assert streams == [os.devnull] * 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_a_full_disk_is_one_line_and_leaves_no_runtime_directory(home):
    # Files are cut off after 8 bytes.
    with serve_fakes(home, "--pool", "true", under=("prlimit", "--fsize=8:8")) as process:
        assert process.communicate(timeout=30)[0] == f"baton: error: {home}/run: file too large\n"
    assert process.returncode == 2
    assert not (home / "run").exists()


def test_a_runtime_directory_without_room_for_a_socket_is_one_line_and_is_let_go(home):
    (home / "run").mkdir(mode=0o700)
    (home / "run" / "supervisor.sock").touch()
    with serve_fakes(home) as process:
        error = process.communicate(timeout=30)[0]
    assert re.fullmatch(rf"baton: error: {home}/run: .*address.* in use\n", error)
    assert process.returncode == 2
    assert [file.name for file in (home / "run").iterdir()] == ["supervisor.sock"]


@pytest.mark.parametrize(
    "argv", [["config", "show"], ["config", "show", "--json"], ["tenants", "new-key"]]
)
def test_a_full_disk_under_its_output_is_one_line(argv):
    command = [sys.executable, "-m", "baton_cluster.cli.main", *argv]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "baton: error: no space left on device\n")


def test_without_standard_input_there_is_no_key():
    under = shell('exec "$@" <&-')
    command = [*under, sys.executable, "-m", "baton_cluster.cli.main", "tenants", "hash-key"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "baton: error: an API key must have at least 24 characters\n"


def test_standard_input_that_is_no_text_is_one_line_and_is_not_shown():
    command = [sys.executable, "-m", "baton_cluster.cli.main", "tenants", "hash-key"]
    strict = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}  # as in most locales
    done = subprocess.run(
        command, input=b"hunter2\xff\n", capture_output=True, env=strict, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr == b"baton: error: standard input is no text in utf-8\n"


@pytest.mark.parametrize(
    "argv",
    [
        ["drain", "decode-\udcff"],
        ["drain", "decode-0", "--reason", "\udcff"],
        ["role", "\udcff", "decode"],
        ["explain", "\udcff"],
        ["explain", "\udcff", "--story"],
    ],
)
def test_bytes_that_are_no_utf_8_are_one_line(home, capsys, argv):
    with answering(FakeControl(), home / "run") as runtime:
        status, shown = error_of(capsys, *argv, "--runtime-dir", str(runtime.path))
    assert (status, shown) == (2, "'\\udcff' is no text in utf-8")


def test_a_setting_that_is_no_utf_8_is_refused_by_its_name(capsys, monkeypatch):
    shown = "--served-model-name: not UTF-8 text"
    assert error_of(capsys, "serve", "--served-model-name", "\udcff") == (2, shown)
    monkeypatch.setenv("BATON_ROUTER_API_KEYS", "one,\udcff")
    assert error_of(capsys, "serve") == (2, "BATON_ROUTER_API_KEYS: not UTF-8 text")


def test_a_model_that_cannot_be_loaded_is_one_line_and_status_1(home):
    with serve_fakes(home, "decode-0:fatal") as process:
        output = process.communicate(timeout=30)[0]
    errors = [line for line in output.splitlines() if not line.endswith("loading weights")]
    assert errors == ["baton: error: no config.json in /nowhere"]
    assert process.returncode == 1
    assert not (home / "run").exists()


def test_a_stop_during_the_start_is_no_error(home):
    with serve_fakes(home, "decode-0:loads-for-ever") as process:
        assert process.stdout is not None
        while "decode-0: loading" not in (line := process.stdout.readline()):
            assert line, "ended before it loaded anything"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert "ready" not in process.stdout.read()


def progress(what: str, done: float | None) -> ChildProgress:
    return ChildProgress(name="decode-0", incarnation=Incarnation(1), what=what, done=done)


def test_off_a_terminal_progress_is_a_line_per_stage():
    console = Console(file=io.StringIO(), force_terminal=False)
    with StartDisplay(console) as display:
        for done in (0.1, 0.5, 1.0):
            display.progress(progress("loading weights", done))
        display.progress(progress("preparing kernels", None))
        display.announce(AnnounceReady())
        display.progress(progress("loading weights", 0.1))
    assert console.file.getvalue() == (  # type: ignore[attr-defined]
        "baton: decode-0: loading weights\nbaton: decode-0: preparing kernels\n"
    )


def test_on_a_terminal_progress_is_one_moving_line():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with StartDisplay(console) as display:
        display.progress(progress("loading weights", 0.4))
        display.progress(progress("loading weights", 0.8))
        display.announce(AnnounceRestart(name="decode-0", after_s=0.5, reason="was killed"))
    line, _, rest = console.file.getvalue().partition("\n")  # type: ignore[attr-defined]
    states = line.split("\r\x1b[2K")  # each is written over the one before it
    assert all(state.count("decode-0: loading weights") <= 1 for state in states)
    assert states[-1].endswith("decode-0: loading weights 80%")
    assert (
        re.sub(r"\x1b\[\??\d+[hAK]|\r", "", rest) == ""
    )  # the line was taken away, and nothing was written below it


def test_the_demo_shows_who_did_what_and_where_the_time_went():
    outcome = Outcome(timing=TIMING, ttft_s=0.0421)
    children = [
        ChildInfo(
            name=name,
            role=name,
            state=ChildState.READY,
            pid=pid,
            incarnation=Incarnation(0xBEEF),
        )
        for name, pid in (("router", 11), ("prefill-0", 12), ("decode-0", 13))
    ]
    console = Console(file=io.StringIO(), width=80)
    console.print(demo.render(outcome, children))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for fact in (
        "prefill-0: 9 tokens, 1 of them cached",
        "decode-0: 10 tokens, 1286 tokens/s",
        "11 pages, 12 B",
        "5.0 ms",
        "42.1 ms",
        "process 13",
        "incarnation beef",
    ):
        assert fact in shown
    assert max(map(len, shown.splitlines())) <= 80

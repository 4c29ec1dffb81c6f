"""Starting and ending other people's servers, with programs that stand in for them."""

import sys
from pathlib import Path

import psutil
import pytest

from bench.peers.servers import llamacpp

SERVES_WITH_A_CHILD = """
import http.server, pathlib, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({pids!r}).write_text(str(child.pid))
port = int(sys.argv[sys.argv.index("--port") + 1])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def program(file: Path, text: str) -> str:
    file.write_text(f"#!{sys.executable}\n{text}")
    file.chmod(0o755)
    return str(file)


def test_a_server_that_ends_at_once_is_reported_with_its_last_words(tmp_path: Path) -> None:
    server = program(tmp_path / "server", "raise SystemExit('cannot read the model')")
    with pytest.raises(RuntimeError, match="cannot read the model"), llamacpp(server, "x.gguf", 1):
        pass


def test_what_a_server_started_ends_with_it(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    server = program(tmp_path / "server", SERVES_WITH_A_CHILD.format(pids=str(pids)))
    with llamacpp(server, "x.gguf", 1):
        child = psutil.Process(int(pids.read_text()))
        assert child.is_running()
    child.wait(timeout=60)
    assert not psutil.pid_exists(child.pid) or child.status() == psutil.STATUS_ZOMBIE


def test_a_server_may_be_named_by_a_relative_path_and_by_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "server", "import sys; raise SystemExit(f'I am {sys.argv[0]}')")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "link").symlink_to("../server")
    monkeypatch.chdir(tmp_path)
    with (
        pytest.raises(RuntimeError, match=f"I am {tmp_path}/bin/link"),
        llamacpp("bin/link", "x.gguf", 1),
    ):
        pass

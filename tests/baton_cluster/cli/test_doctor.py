import json
import socket
import subprocess
import sys
import tempfile

import pytest

from baton import native
from baton.errors import ConfigError
from baton.rpc.v1.common_pb2 import WorkerIdentity
from baton.rpc.v1.control_pb2 import StatusReply, WorkerStatus
from baton_cluster.cli import doctor
from baton_cluster.cli.main import main
from baton_cluster.launch.runtime_dir import RuntimeDir
from tests.baton_cluster.cli.fake_control import FakeControl, answering


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def findings(capsys, port: int) -> tuple[int, dict[str, dict[str, str]]]:
    status = main(["doctor", "--json", "--port", str(port)])
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] == (status == 0)
    return status, {finding["name"]: finding for finding in report["findings"]}


def test_a_machine_on_which_these_tests_run_can_run_a_cluster(capsys, free_port):
    status, found = findings(capsys, free_port)
    assert status == 0
    for name in ("cores", "memory", "packages", "transport shm", "loopback", f"port {free_port}"):
        assert found[name]["verdict"] in ("ok", "warn"), found[name]


def test_it_looks_where_the_environment_leaves_settings_to_a_file(capsys, monkeypatch, free_port):
    monkeypatch.setenv("BATON_POOL_PEER_ADDRESS", "10.0.0.7:7002")  # needs pool.directory
    _, found = findings(capsys, free_port)
    assert f"port {free_port}" in found


def test_a_taken_port_would_stop_a_cluster(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, found = findings(capsys, port)
    assert status == 1
    assert found[f"port {port}"]["verdict"] == "fail"
    assert "is taken" in found[f"port {port}"]["found"]


def test_for_people_it_ends_with_what_it_all_means(capsys, free_port):
    assert main(["doctor", "--port", str(free_port)]) == 0
    assert "A cluster can run here." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "value", "check", "verdict"),
    [
        ("available_bytes", 2**29, doctor.check_memory, "fail"),
        ("available_bytes", 2**31, doctor.check_memory, "warn"),
        ("available_bytes", 2**34, doctor.check_memory, "ok"),
        ("usable_cores", 1, doctor.check_cores, "warn"),
        ("cpu_flags", frozenset({"sse2"}), doctor.check_instructions, "warn"),
        ("cpu_flags", frozenset({"avx2", "amx_bf16"}), doctor.check_instructions, "ok"),
    ],
)
def test_a_finding_is_judged_by_what_is_there(monkeypatch, name, value, check, verdict):
    monkeypatch.setattr(doctor, name, lambda: value)
    assert check().verdict.value == verdict


@pytest.mark.parametrize(
    ("given", "advised"), [("never", True), ("advise", False), ("unknown", False)]
)
def test_it_says_where_shared_memory_gets_no_huge_pages(monkeypatch, given, advised):
    monkeypatch.setattr(doctor, "shared_huge_pages", lambda: given)
    finding = doctor.check_huge_pages()
    assert f"transparent for shared memory: {given}" in finding.found
    assert ("echo advise" in finding.advice) is advised


def test_without_compiled_code_it_says_what_that_costs(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "ROOT", tmp_path)
    finding = doctor.check_compiled_code()
    assert finding.verdict is doctor.Verdict.WARN
    assert "kernels is not built" in finding.found
    assert "several times slower" in finding.advice


def test_a_broken_driver_is_a_warning_and_no_crash(monkeypatch, tmp_path):
    broken = tmp_path / "nvidia-smi"
    broken.write_text("#!/bin/sh\nexit 9\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.check_gpus().verdict is doctor.Verdict.WARN


def test_gpus_are_listed_as_their_driver_names_them(monkeypatch, tmp_path):
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 570.1'\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.check_gpus().found == "NVIDIA H200, 143771 MiB, 570.1"


def test_a_runtime_directory_that_cannot_be_made_would_stop_a_cluster(monkeypatch):
    def refuse(_path):
        raise ConfigError("no room")

    monkeypatch.setattr(RuntimeDir, "claim", refuse)
    assert doctor.check_runtime_dir().verdict is doctor.Verdict.FAIL


def test_without_any_temporary_directory_it_says_so_beside_all_else(capsys, monkeypatch, free_port):
    def refuse() -> str:
        raise FileNotFoundError("No usable temporary directory")

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    status, found = findings(capsys, free_port)
    assert status == 1
    assert "set TMPDIR" in found["runtime directory"]["advice"]
    assert "No usable temporary directory" in found["port"]["found"]
    assert found["cores"]["verdict"] != "fail"


@pytest.mark.parametrize("is_configured", [False, True])
def test_it_says_which_workers_are_drained_and_who_asked(monkeypatch, home, is_configured):
    workers = [
        WorkerStatus(identity=WorkerIdentity(worker_id="decode-0"), drained_by="uid 0, new disk"),
        WorkerStatus(identity=WorkerIdentity(worker_id="decode-1")),
    ]
    told = StatusReply(workers=workers)
    if is_configured:
        monkeypatch.setenv("BATON_CLUSTER_RUNTIME_DIR", str(home / "8000"))
    else:
        monkeypatch.setattr(doctor, "running_clusters", lambda: [home / "8000"])
    with answering(FakeControl(status=told), home / "8000"):
        found = doctor.check_drained_workers()
        assert found.verdict is doctor.Verdict.WARN
        assert found.found == "decode-0 of 8000, by uid 0, new disk"
        assert "baton undrain" in found.advice
        del told.workers[0]
        assert doctor.check_drained_workers().verdict is doctor.Verdict.OK


def test_the_command_line_never_imports_torch():
    code = "import sys, baton_cluster.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0

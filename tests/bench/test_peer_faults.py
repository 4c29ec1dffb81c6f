import json
from pathlib import Path

import pytest

from bench import peer_faults


@pytest.mark.parametrize(
    ("python", "reason"),
    [("", "no --vllm-python was named"), ("nowhere/python", "No such file or directory")],
)
def test_a_server_that_cannot_be_started_is_absent_and_the_others_go_on(
    python: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_faults, "write_model", lambda *_: None)
    file = tmp_path / "report.json"
    words = ["--only", "vllm", "baton_vllm", "--faults", "engine_killed", "--vllm-python", python]
    monkeypatch.setattr("sys.argv", ["peer_faults", *words, "--json", str(file)])
    peer_faults.main()
    settings = json.loads(file.read_text())["settings"]
    for name in ("vllm", "baton_vllm"):
        assert reason in settings[f"absent_{name}_engine_killed"]

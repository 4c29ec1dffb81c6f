import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench import serving
from tests.bench.conftest import Served


def test_what_warms_a_cluster_up_is_no_figure(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def stand_in(*_: str) -> Iterator[str]:
        yield served.url

    monkeypatch.setattr(serving, "serving", stand_in)
    monkeypatch.setattr(serving, "write_model", lambda *_: None)
    file = tmp_path / "report.json"
    words = ["--concurrency", "2", "--rounds", "1", "--output-tokens", "2", "--json", str(file)]
    monkeypatch.setattr("sys.argv", ["serving", *words])
    serving.main()
    levels = {name.rpartition("_")[2] for name in json.loads(file.read_text())["figures"]}
    assert levels == {"c2"}

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench import serving
from tests.bench.conftest import Served

_WORDS = ("--concurrency", "2", "--rounds", "1", "--output-tokens", "2")


class Clusters:
    """Stands in for those that are started.

    Attributes:
        started: The kinds of their workers, in turn.
        failing: The kind that does not start.
    """

    def __init__(self, url: str) -> None:
        self.started: list[str] = []
        self.failing = ""
        self._url = url

    @contextmanager
    def start(self, _directory: str, *flags: str) -> Iterator[str]:
        self.started.append("hybrid" if "--hybrid-workers" in flags else "pair")
        if self.started[-1] == self.failing:
            raise RuntimeError("it does not start")
        yield self._url


@pytest.fixture
def clusters(served: Served, monkeypatch: pytest.MonkeyPatch) -> Clusters:
    stand_ins = Clusters(served.url)
    monkeypatch.setattr(serving, "serving", stand_ins.start)
    monkeypatch.setattr(serving, "write_model", lambda *_: None)
    return stand_ins


def measure(file: Path, *words: str) -> None:
    serving.main([*_WORDS, "--json", str(file), *words])


def test_what_warms_a_cluster_up_is_no_figure(clusters: Clusters, tmp_path: Path) -> None:
    measure(tmp_path / "report.json")
    figures = json.loads((tmp_path / "report.json").read_text())["figures"]
    assert {name.rpartition("_")[2] for name in figures} == {"c2"}
    assert {"output_tok_s_c2", "hybrid_output_tok_s_c2"} <= figures.keys()


def test_clusters_take_turns(clusters: Clusters, tmp_path: Path) -> None:
    measure(tmp_path / "report.json", "--turns", "3")
    assert clusters.started == ["pair", "hybrid"] * 3


def test_a_cluster_that_does_not_start_leaves_the_figures_of_the_other(
    clusters: Clusters, tmp_path: Path
) -> None:
    clusters.failing = "hybrid"
    with pytest.raises(SystemExit, match="it does not start"):
        measure(tmp_path / "report.json", "--turns", "2")
    assert clusters.started == ["pair", "hybrid", "pair"]
    document = json.loads((tmp_path / "report.json").read_text())
    assert "output_tok_s_c2" in document["figures"]
    assert "it does not start" in document["ended_by"]

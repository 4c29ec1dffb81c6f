"""The benchmark of a full prefix index runs at any size."""

import json

import pytest

from bench import prefix_index


def test_it_tells_the_longest_piece_of_work(tmp_path):
    target = tmp_path / "report.json"
    sizes = ["--workers", "5", "--blocks", "3000", "--restarts", "3"]
    prefix_index.main([*sizes, "--json", str(target)])
    figures = json.loads(target.read_text())["figures"]
    assert figures["restart_longest_ms"] > 0.0
    assert figures["indexed_blocks"] == 3000


def test_more_restarts_than_workers_are_refused():
    with pytest.raises(SystemExit):
        prefix_index.main(["--workers", "2", "--restarts", "3"])

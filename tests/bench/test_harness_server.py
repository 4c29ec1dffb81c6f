from pathlib import Path

import pytest

from bench.harness.server import serving
from tests.waits import eventually

SAYS_MUCH = """
import pathlib, time
print("baton: ready on http://127.0.0.1:1 (model bench)", flush=True)
print("a warning\\n" * 100_000, flush=True)
pathlib.Path({file!r}).touch()
time.sleep(600)
"""


def test_a_cluster_that_says_much_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "went_on"
    (tmp_path / "stand_in.py").write_text(SAYS_MUCH.format(file=str(file)))
    settings = {"PYTHONPATH": str(tmp_path)}
    with serving("model", module="stand_in", settings=settings) as url:
        assert url == "http://127.0.0.1:1"
        eventually(file.exists)


def test_a_cluster_that_does_not_start_is_reported_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "stand_in.py").write_text("raise SystemExit('cannot read the model')")
    settings = {"PYTHONPATH": str(tmp_path)}
    with (
        pytest.raises(RuntimeError, match="cannot read the model"),
        serving("model", module="stand_in", settings=settings),
    ):
        pass

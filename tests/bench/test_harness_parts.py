import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from bench.harness.parts import merge_parts


def part(file: Path, revision: str = "r", **figures: float) -> Path:
    document = {"benchmark": "b", "revision": revision, "hardware": {"cores": 2}, "versions": {}}
    document["kernels"] = {"kernels": "x86_64_v3"}
    file.write_text(json.dumps(document | {"figures": figures, "settings": {"file": file.name}}))
    return file


def total(figures: Mapping[str, float]) -> dict[str, float]:
    return {"total": sum(figures.values())}


def test_figures_of_all_parts_stand_in_one_report(tmp_path: Path) -> None:
    files = [
        part(tmp_path / "a", ours=1.0, ratio_a=5.0),
        part(tmp_path / "b", ours=3.0, ratio_b=6.0),
    ]
    merged = merge_parts(files, total)
    assert merged["figures"] == {"ours": 2.0, "ratio_a": 5.0, "ratio_b": 6.0, "total": 13.0}
    assert merged["settings"] == [{"file": "a"}, {"file": "b"}]
    assert merged["benchmark"] == "b"
    assert merged["kernels"] == {"kernels": "x86_64_v3"}


def test_parts_that_measured_other_loads_are_not_put_together(tmp_path: Path) -> None:
    files = [part(tmp_path / "a"), part(tmp_path / "b")]
    document = json.loads(files[1].read_text())
    document["settings"]["output_tokens"] = 8
    files[1].write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"output_tokens: None in .*, but 8 in"):
        merge_parts(files, total)


def test_parts_of_different_revisions_are_not_put_together(tmp_path: Path) -> None:
    files = [part(tmp_path / "a"), part(tmp_path / "b", revision="other")]
    with pytest.raises(ValueError, match=r"revision: r in .*, but other in"):
        merge_parts(files, total)


def test_parts_of_different_compiled_code_are_not_put_together(tmp_path: Path) -> None:
    files = [part(tmp_path / "a"), part(tmp_path / "b")]
    files[1].write_text(files[1].read_text().replace("x86_64_v3", "not built"))
    with pytest.raises(ValueError, match=r"kernels: .*x86_64_v3.* in .*, but .*not built.* in"):
        merge_parts(files, total)


@pytest.mark.parametrize("text", ["", "[]", '{"figures": {}}'])
def test_what_is_no_report_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "b").write_text(text)
    with pytest.raises(ValueError, match=f"{tmp_path / 'b'}"):
        merge_parts([part(tmp_path / "a"), tmp_path / "b"], total)

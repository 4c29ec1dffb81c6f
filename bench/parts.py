"""Puts the reports of a benchmark that ran in parts together: one benchmark, one revision, one machine."""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_ALIKE = ("benchmark", "revision", "hardware", "versions")


def merge_parts(
    files: Sequence[Path], summary: Callable[[Mapping[str, float]], dict[str, float]]
) -> dict[str, object]:
    """One report of several, as it is written.

    A figure that several parts have is their median. A ratio stands in the part that measured both sides, so it stays one of a single
    run; what is said of all figures together is said anew by `summary`. `settings` lists those of the parts.

    Raises:
        ValueError: A part is of another benchmark, revision, machine or of other versions than the first.
    """
    parts = [json.loads(file.read_text()) for file in files]
    first = parts[0]
    for file, part in zip(files, parts, strict=True):
        for field in _ALIKE:
            if part[field] != first[field]:
                raise ValueError(
                    f"{field}: {first[field]} in {files[0]}, but {part[field]} in {file}"
                )
    names = sorted({name for part in parts for name in part["figures"]})
    figures = {
        name: statistics.median(part["figures"][name] for part in parts if name in part["figures"])
        for name in names
    }
    return {field: first[field] for field in _ALIKE} | {
        "figures": dict(sorted((figures | summary(figures)).items())),
        "settings": [part["settings"] for part in parts],
    }

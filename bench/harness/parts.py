"""Puts the reports of a benchmark that ran in parts together: one benchmark, one revision, one machine with the same
compiled code.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_ALIKE = ("benchmark", "revision", "hardware", "kernels", "versions")
_LOAD = (
    *("dtype", "tbt_target", "input_tokens", "output_tokens", "requests"),
    *("prompt_tokens", "prompt_clients"),
)
"""Settings that say what a figure means."""


def merge_parts(
    files: Sequence[Path], summary: Callable[[Mapping[str, float]], dict[str, float]]
) -> dict[str, object]:
    """One report of several, as it is written.

    A figure that several parts have is their median. A ratio stands in the part that measured both sides, so it stays
    one of a single run; what is said of all figures together is said anew by `summary`.
    `settings` lists those of the parts.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is no report, or one of another benchmark, revision, machine or load, or of other versions or
            kernels, than the first.
    """
    parts = [_read(file) for file in files]
    first = parts[0]
    for file, part in zip(files, parts, strict=True):
        for field in _ALIKE:
            if part[field] != first[field]:
                raise ValueError(
                    f"{field}: {first[field]} in {files[0]}, but {part[field]} in {file}"
                )
        for field in _LOAD:
            one, other = first["settings"].get(field), part["settings"].get(field)
            if one != other:
                raise ValueError(f"{field}: {one} in {files[0]}, but {other} in {file}")
    names = sorted({name for part in parts for name in part["figures"]})
    figures = {
        name: statistics.median(part["figures"][name] for part in parts if name in part["figures"])
        for name in names
    }
    return {field: first[field] for field in _ALIKE} | {
        "figures": dict(sorted((figures | summary(figures)).items())),
        "settings": [part["settings"] for part in parts],
    }


def _read(file: Path) -> dict[str, Any]:
    try:
        part = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    if not isinstance(part, dict) or not part.keys() >= {*_ALIKE, "figures", "settings"}:
        raise ValueError(f"{file} is no report of a run")
    return part

"""Runs Python as on an image for GPUs that has torch and little else:
`python -m tests.lean_image MODULE ...` imports, `... --pytest ARGS` tests.

What is installed here besides is not found by imports, as if it were not there.
"""

import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from packaging.requirements import Requirement

LEAN = ("torch", "triton", "numpy", "psutil", "grpcio", "xxhash", "pytest")
"""Distributions that such an image has, by docs/gpu-status.md; what they need themselves is there as well."""


def hide_all_but(distributions: Iterable[str]) -> None:
    """From now on imports find these distributions, what they need, the standard library and Baton only."""
    kept = _with_needs(distributions)
    hidden = {
        package
        for package, owners in metadata.packages_distributions().items()
        if not kept.intersection(map(_normal, owners)) and "baton-serve" not in owners
    }
    find = PathFinder.find_spec

    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if name.partition(".")[0] in hidden else find(name, path, target)

    # No function: pytest keeps it as an attribute of a class, where a function becomes a method.
    PathFinder.find_spec = partial(find_spec)  # type: ignore[method-assign]


def _with_needs(distributions: Iterable[str]) -> set[str]:
    kept: set[str] = set()
    waiting = [_normal(name) for name in distributions]
    while waiting:
        name = waiting.pop()
        if name in kept:
            continue
        kept.add(name)
        try:
            needs = [Requirement(need) for need in metadata.requires(name) or ()]
        except metadata.PackageNotFoundError:
            continue
        waiting += [
            _normal(need.name)
            for need in needs
            if need.marker is None or need.marker.evaluate({"extra": ""})
        ]
    return kept


def _normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def main() -> None:
    """Entry point."""
    names = sys.argv[1:]
    hide_all_but(LEAN)
    if names[:1] == ["--pytest"]:
        import pytest

        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # those found by name are hidden
        sys.exit(pytest.main(names[1:]))
    for name in names:
        importlib.import_module(name)


if __name__ == "__main__":
    main()

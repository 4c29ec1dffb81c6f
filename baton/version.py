"""The version of this Baton, from the one place where it is written: pyproject.toml."""

import tomllib
from importlib import metadata
from pathlib import Path


def version() -> str:
    """The installed version, or that of the checkout which runs without being installed."""
    try:
        return metadata.version("baton-serve")
    except metadata.PackageNotFoundError:
        text = (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text()
        return str(tomllib.loads(text)["project"]["version"])

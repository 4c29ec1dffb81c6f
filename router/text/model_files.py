"""The files of a model that a router needs: tokenizer, chat template, generation defaults. Never its weights."""

import importlib
import os
from pathlib import Path

from baton.errors import ModelLoadError, first_line

_SNAPSHOTS = "snapshots"
_PATTERNS = ["*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt"]


def model_files(model: str, revision: str | None) -> Path:
    """The directory with those files: a local one, or a snapshot of a hub id. Blocks while it downloads.

    Raises:
        ModelLoadError: There is no such directory, or the hub does not give it, or the directory is not that revision.
    """
    path = Path(os.path.expanduser(model))
    if path.is_dir():
        if revision is not None and revision != revision_of(path):
            raise ModelLoadError(
                f"model {model!r} is a directory, and nothing says that it holds revision {revision!r}",
                param="model.revision",
            )
        return path
    return _from_hub(model, revision)


def _from_hub(model: str, revision: str | None) -> Path:
    # Imported here: it takes 0.2 s of every start, and a model in a local directory does not need it.
    hub = importlib.import_module("huggingface_hub")
    try:
        return Path(hub.snapshot_download(model, revision=revision, allow_patterns=_PATTERNS))
    except Exception as error:  # its own, its HTTP client's or its downloader's
        raise ModelLoadError(
            f"model {model!r} is no directory here nor on the hub: {first_line(error)}"
        ) from error


def revision_of(directory: Path) -> str | None:
    """The commit of a snapshot of the hub, which is the name of its directory; None for any other directory."""
    resolved = directory.resolve()
    return resolved.name if resolved.parent.name == _SNAPSHOTS else None

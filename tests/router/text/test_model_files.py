"""A model is pinned to a revision: the hub is asked for that one, and what cannot be it is not served as it."""

from pathlib import Path

import httpx
import pytest
from huggingface_hub.utils._paths import filter_repo_objects

from baton.errors import ModelLoadError
from router.text.model_files import model_files, revision_of
from tests.router.served import serve

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _snapshot(tmp_path: Path) -> Path:
    directory = tmp_path / "models--x" / "snapshots" / COMMIT
    directory.mkdir(parents=True)
    return directory


def test_the_hub_is_asked_for_all_that_a_tokenizer_is_made_of_at_the_pinned_revision(
    tmp_path, monkeypatch
):
    asked = []

    def download(model, revision, allow_patterns):
        names = ["vocab.json", "merges.txt", "tokenizer.model", "model.safetensors"]
        asked.append(
            (model, revision, [*filter_repo_objects(names, allow_patterns=allow_patterns)])
        )
        return str(_snapshot(tmp_path))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert revision_of(model_files("org/model", COMMIT)) == COMMIT
    assert asked == [("org/model", COMMIT, ["vocab.json", "merges.txt", "tokenizer.model"])]


def test_a_download_that_breaks_off_is_one_clear_line(monkeypatch):
    def download(*args, **kwargs):
        raise httpx.ReadError("server disconnected")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ModelLoadError, match=r"nor on the hub: server disconnected$"):
        model_files("org/model", None)


def test_a_directory_is_not_taken_for_a_revision_that_it_does_not_name(tmp_path):
    snapshot = _snapshot(tmp_path)
    assert model_files(str(snapshot), COMMIT) == snapshot
    assert model_files(str(tmp_path), None) == tmp_path
    for directory in (tmp_path, snapshot):
        with pytest.raises(ModelLoadError, match="revision 'main'"):
            model_files(str(directory), "main")


def test_a_directory_that_is_no_snapshot_has_no_revision(tmp_path):
    assert revision_of(tmp_path) is None


async def test_clients_are_told_the_revision():
    async with serve(revision=COMMIT) as served:
        (card, _) = (await served.http.get("/v1/models")).json()["data"]
        assert card["revision"] == COMMIT

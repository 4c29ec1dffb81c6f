"""Checkpoints whose files have the same names and sizes are told apart by what is in them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from baton.errors import ModelLoadError
from baton_vllm.weights import digest_weights
from tests.baton_vllm.test_mixed_pairs import of_vllm, refused


def write_safetensors(directory: Path, seed: int, name: str = "model") -> None:
    random = torch.Generator().manual_seed(seed)
    weights = {"embed.weight": torch.randn(64, 16, generator=random)}
    save_file(weights | {"k_proj.weight": torch.ones(16, 16)}, directory / f"{name}.safetensors")


def write_bin(directory: Path, seed: int) -> None:
    (directory / "pytorch_model.bin").write_bytes(bytes(4096) + bytes([seed]))


def write_shards(directory: Path, seed: int) -> None:
    """Without an index, the second one alone differs."""
    write_safetensors(directory, 0, "model-00001-of-00002")
    write_safetensors(directory, seed, "model-00002-of-00002")


def made(directory: Path, write: Callable[[Path, int], None], seed: int) -> Path:
    directory.mkdir(parents=True)
    write(directory, seed)
    return directory


@pytest.mark.parametrize("write", [write_safetensors, write_shards, write_bin])
def test_fine_tunes_of_equal_size_have_digests_of_their_own(
    write: Callable[[Path, int], None], tmp_path: Path
) -> None:
    one, other = (made(tmp_path / str(seed), write, seed) for seed in (1, 2))
    sizes = [
        [(file.name, file.stat().st_size) for file in sorted(each.iterdir())]
        for each in (one, other)
    ]
    assert sizes[0] == sizes[1]
    assert digest_weights(one) != digest_weights(other)
    assert digest_weights(one) == digest_weights(made(tmp_path / "copy", write, 1))


def test_a_pair_with_fine_tunes_of_equal_size_is_refused_at_the_hello(tmp_path: Path) -> None:
    digests = [
        digest_weights(made(tmp_path / str(seed), write_safetensors, seed)) for seed in (1, 2)
    ]
    error = refused(*(of_vllm(model=digest) for digest in digests))
    assert error.param == "model_fingerprint"
    assert all(f"model={digest}" in error.message for digest in digests)


def test_weights_that_lie_elsewhere_are_known_by_the_commit_of_their_snapshot(
    tmp_path: Path,
) -> None:
    one, other, again = (
        made(tmp_path / cache / "snapshots" / commit, lambda *_: None, 0)
        for cache, commit in (("a", "0123"), ("a", "4567"), ("b", "0123"))
    )
    assert digest_weights(one) != digest_weights(other)
    assert digest_weights(one) == digest_weights(again)


def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 64)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is corrupt"):
        digest_weights(tmp_path)

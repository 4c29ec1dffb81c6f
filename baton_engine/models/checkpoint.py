"""The safetensors files of a model directory: which tensor is where, and what it looks like. No weights are read here
beyond a sample for the fingerprint."""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from baton.errors import ModelLoadError
from baton_engine.models.json_fields import read_json_fields

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
QUANTISED_REFUSED = "quantised weights are not supported"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where one tensor lies and how it is stored; `dtype` in safetensors' names (`F32`, `BF16`, …)."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """All tensors of one model directory."""

    path: Path
    tensors: dict[str, StoredTensor]

    @property
    def files(self) -> tuple[Path, ...]:
        """The files, sorted by name."""
        return tuple(sorted({tensor.file for tensor in self.tensors.values()}))

    @property
    def num_elements(self) -> int:
        """Of all tensors together."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    def require(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """The tensor of that name.

        Raises:
            ModelLoadError: It is missing or has another shape.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            packed = next((other for other in self.tensors if _is_packed(other, name)), None)
            raise ModelLoadError(
                f"{self.path}: tensor {name} is missing from the weights"
                + (f", which have {packed}; {QUANTISED_REFUSED}" if packed else "")
            )
        if tensor.dtype == "U8":  # several numbers to a byte
            raise ModelLoadError(
                f"{tensor.file}: tensor {name} is stored as U8; {QUANTISED_REFUSED}"
            )
        if tensor.shape != shape:
            raise ModelLoadError(
                f"{tensor.file}: tensor {name} has shape {list(tensor.shape)}, "
                f"but config.json asks for {list(shape)}"
            )
        return tensor


def _is_packed(name: str, weight: str) -> bool:
    """Whether that is a part of `weight` in GPTQ's, AWQ's or compressed-tensors' form (`qweight`, `weight_packed`)."""
    return name in (weight.removesuffix("weight") + "qweight", weight + "_packed")


class TensorView(Protocol):
    """A tensor that has not been read; safetensors ships without types."""

    def get_shape(self) -> list[int]:
        """Its shape."""

    def get_dtype(self) -> str:
        """Its dtype in safetensors' names."""

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """Reads some of its rows."""


class OpenFile(Protocol):
    """What is used of an open safetensors file."""

    def keys(self) -> list[str]:
        """Names of the tensors."""

    def get_slice(self, name: str) -> TensorView:
        """Looks at a tensor without reading it."""

    def get_tensor(self, name: str) -> torch.Tensor:
        """Reads a tensor."""


@contextmanager
def open_safetensors(file: Path) -> Iterator[OpenFile]:
    """Maps one file, turning every way it can be broken into one clear line.

    Raises:
        ModelLoadError: The file is missing, truncated or not safetensors.
    """
    # An image for GPUs that reads no weights, as that of `bench.gpu_day`, may lack it.
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except FileNotFoundError:
        raise ModelLoadError(f"{file} is missing") from None
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{file} is corrupt or truncated: {error}") from error


def read_checkpoint(path: Path) -> Checkpoint:
    """Reads the headers of a model directory's safetensors, one file or sharded by an index.

    Raises:
        ModelLoadError: No weights, a shard is missing or corrupt, or a tensor is not where the index says.
    """
    # In transformers' order: what it saves as one file leaves the index of an earlier save where it is.
    if (path / SINGLE_FILE).exists():
        return read_files(path, [path / SINGLE_FILE])
    index_file = path / INDEX_FILE
    if index_file.exists():
        return Checkpoint(path=path, tensors=_read_sharded(path, index_file))
    raise ModelLoadError(f"{path} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}")


def read_files(path: Path, files: Iterable[Path]) -> Checkpoint:
    """As `read_checkpoint`, of these files of the directory `path`, whatever their names.

    Raises:
        ModelLoadError: One is missing or corrupt.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        tensors |= _read_header(file)
    return Checkpoint(path=path, tensors=tensors)


def fingerprint(checkpoint: Checkpoint, config: dict[str, object]) -> str:
    """A digest by which two workers know that they hold the same model.

    Covers the config, and of every tensor its name, shape, dtype, and first row or, of a vector, all of it: two
    fine-tunes of one model may differ in a few matrices alone, wherever these stand in a file.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(config, sort_keys=True).encode())
    for name, tensor in sorted(checkpoint.tensors.items()):
        digest.update(repr((name, tensor.shape, tensor.dtype)).encode())
    for file in checkpoint.files:
        with open_safetensors(file) as handle:
            for name in sorted(handle.keys()):
                digest.update(_sample(handle, name))
    return digest.hexdigest()


def _sample(handle: OpenFile, name: str) -> bytes:
    view = handle.get_slice(name)
    read = view[:1] if len(view.get_shape()) > 1 else handle.get_tensor(name)
    return read.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _read_sharded(path: Path, index_file: Path) -> dict[str, StoredTensor]:
    weight_map = read_json_fields(index_file).child("weight_map")
    file_of = {name: weight_map.text(name) for name in weight_map.values}
    found: dict[str, StoredTensor] = {}
    for file_name in sorted(set(file_of.values())):
        if Path(file_name).name != file_name:
            raise ModelLoadError(f"{index_file} names a file outside its directory: {file_name!r}")
        found.update(_read_header(path / file_name))
    for name, file_name in file_of.items():
        if name not in found or found[name].file.name != file_name:
            raise ModelLoadError(
                f"{path / file_name} does not hold tensor {name}, as the index says"
            )
    return found


def _read_header(file: Path) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    with open_safetensors(file) as handle:
        for name in handle.keys():  # noqa: SIM118 - an open file is not iterable
            view = handle.get_slice(name)
            tensors[name] = StoredTensor(
                file=file, shape=tuple(view.get_shape()), dtype=view.get_dtype()
            )
    return tensors

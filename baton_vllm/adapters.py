"""LoRA adapters that a worker with vLLM serves: read and checked before vLLM loads anything, and a digest of what is in
them.

A request names an adapter. Which weights that name stands for is in the layout's fingerprint (`fingerprint`), so that
workers with others refuse each other's pages, and no block of one has a key of another's.
"""

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from baton.config.lora import read_lora_modules
from baton.errors import ConfigError

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One adapter.

    Attributes:
        name: By which requests ask for it.
        path: Its directory.
        number: vLLM's id of it, from 1.
        rank: The highest of its matrices.
        digest: Of its settings and its weights.
    """

    name: str
    path: Path
    number: int
    rank: int
    digest: str


def read_adapters(entries: Iterable[str]) -> tuple[Adapter, ...]:
    """Those that `model.lora_modules` names. Reads all of their weights, for the digest.

    Args:
        entries: `NAME=PATH` each.

    Raises:
        ConfigError: There is none where one should be; names it.
    """
    modules = read_lora_modules(entries)
    return tuple(
        _read(name, Path(os.path.expanduser(path)), number)
        for number, (name, path) in enumerate(modules.items(), start=1)
    )


def check_ranks(adapters: Iterable[Adapter], max_rank: int) -> None:
    """Holds them against vLLM's `max_lora_rank`.

    Raises:
        ConfigError: The rank of one is higher; names it.
    """
    for adapter in adapters:
        if adapter.rank > max_rank:
            why = f"its rank is {adapter.rank}, engine.vllm.max_lora_rank is {max_rank}"
            raise refusal(adapter.name, why)


def check_unchanged(adapter: Adapter) -> None:
    """Holds the files against the adapter once vLLM has loaded them: whatever was put there since they were read may be
    what it loaded, under the digest of what was there before.

    Raises:
        ConfigError: They are others, or gone; names the adapter.
    """
    if _read(adapter.name, adapter.path, adapter.number) != adapter:
        raise refusal(
            adapter.name, f"{adapter.path} changed since this worker read it; start it again"
        )


def num_held(adapters: Collection[Adapter], settings: Mapping[str, object]) -> int:
    """How many vLLM is to hold in memory: all of them. One that it gave up it would read again when it is asked for, of
    files that may be others by then, or gone: wrong answers under the same fingerprint, or the worker's end.

    Args:
        adapters: All.
        settings: Of vLLM.

    Raises:
        ConfigError: `max_cpu_loras` is lower.
    """
    given, at_once = settings.get("max_cpu_loras"), settings.get("max_loras")
    least = max(len(adapters), at_once if isinstance(at_once, int) else 1)
    if given is None:
        return least
    if not isinstance(given, int) or given < len(adapters):
        path = "engine.vllm.max_cpu_loras"
        why = f"is {given!r}, and all {len(adapters)} adapters are held"
        raise ConfigError(f"{path}: {why}; it is as many if left out", param=path)
    return given


def refusal(name: str, why: str) -> ConfigError:
    """That the adapter called `name` cannot be served."""
    return ConfigError(f"model.lora_modules.{name}: {why}", param="model.lora_modules")


def fingerprint(adapters: Sequence[Adapter], lora_config: object) -> str:
    """A digest of all adapters by their names, and of what else decides what vLLM computes with them."""
    settings = [f"{name}={getattr(lora_config, name)}" for name in ("lora_dtype", "target_modules")]
    parts = [*(f"{each.name} {each.digest}" for each in adapters), *settings]
    return blake2b("\0".join(sorted(parts)).encode(), digest_size=16).hexdigest()


def digest_files(*files: Path) -> str:
    """Of their names, sizes and all of their bytes, in that order. Blocks."""
    digest = blake2b(digest_size=16)
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size}\0".encode())
        with file.open("rb") as opened:
            while chunk := opened.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def _read(name: str, path: Path, number: int) -> Adapter:
    config = path / _CONFIG
    weights = next((path / file for file in _WEIGHTS if (path / file).is_file()), None)
    if not path.is_dir():
        raise refusal(name, f"there is no directory {path}")
    if not config.is_file():
        raise refusal(name, f"{path} has no {_CONFIG}")
    if weights is None:
        raise refusal(name, f"{path} has no {' or '.join(_WEIGHTS)}")
    rank = _rank(name, config)
    try:
        digest = digest_files(config, weights)
    except OSError as error:
        raise refusal(name, f"{path} cannot be read: {error.strerror}") from error
    return Adapter(name=name, path=path.absolute(), number=number, rank=rank, digest=digest)


def _rank(name: str, config: Path) -> int:
    try:
        told = json.loads(config.read_text())
        ranks: list[int] = [told["r"], *(told.get("rank_pattern") or {}).values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise refusal(name, f"{config} tells no rank (r)") from error
    if not all(type(rank) is int and rank > 0 for rank in ranks):
        raise refusal(name, f"{config}: a rank (r) is a whole number above 0")
    return max(ranks)

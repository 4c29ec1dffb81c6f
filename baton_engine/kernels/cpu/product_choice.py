"""Which product serves bfloat16 weights on this CPU: measured once per processor, before a model is loaded, and kept in
the user's cache directory. `python -m baton_engine.kernels.cpu.product_choice` says which.

A processor's flags say what it can do, not what is fast there: of two with AVX-512 for bfloat16, one multiplied
bfloat16 by oneDNN at half the speed of float32, the other at twice.
"""

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from hashlib import sha256
from itertools import product
from pathlib import Path

import torch
from filelock import FileLock
from torch.nn import functional

from baton import native
from baton.cpu_features import cpu_flags, cpu_name
from baton.errors import ConfigError
from baton_engine.kernels.cpu.matmul import (
    BFloat16Panels,
    built_for,
    multiplies_bfloat16,
    reads_bfloat16,
    why_no_tiles,
)

logger = logging.getLogger(__name__)

ROWS = (1, 8, 32, 256)
"""Tokens of the products that are compared: decodes of different batches and a chunk of a prompt,
each with the same weight.
"""
_OUTPUTS, _INPUTS, _MATRICES = 2048, 2048, 2
_SWEPT_BYTES = 128 << 20
"""Read before each product of few tokens is timed, so that its weights come from memory as a model's do, not from a
cache.
"""
_ROUNDS = 3
_METHOD = (*ROWS, _OUTPUTS, _INPUTS, _MATRICES, _SWEPT_BYTES)
_WORTH_MORE_MEMORY = 1.1
"""How many times as fast `MIXED` has to be, whose weights take 1.75 to 2.3 times the memory of another's."""
_WORTH_PLAIN_WEIGHTS = 1.03
"""The same of weights that lie plain, beside compressed ones."""
_LOCK_TIMEOUT_S = 10.0

Product = Callable[[torch.Tensor], torch.Tensor]


class Bfloat16Product(StrEnum):
    """How `x @ weight.T` is computed with weights that are stored as bfloat16."""

    PANELS = "panels"
    """Own code, `BFloat16Panels`: computed in float32; layers are computed whole."""
    PAIRS = "pairs"
    """The same code with the instructions for bfloat16 of AVX-512: of bfloat16, summed in float32."""
    COMPRESSED_PANELS = "compressed_panels"
    """`panels`, to the bit, over weights whose upper bytes are coded: three quarters of the memory, and of what a
    decode waits for.
    """
    COMPRESSED_PAIRS = "compressed_pairs"
    """`pairs` over such weights, likewise."""
    MIXED = "mixed"
    """`compressed_pairs` for steps of up to `FEW_TOKENS`, `onednn` for more: the weights are held for both,
    in 1.75 times the memory.
    """
    AMX = "amx"
    """`pairs` for steps of up to `FEW_TOKENS`, own code with AMX's tiles for more, on the same weights. Not fast yet:
    never chosen unless asked for.
    """
    ONEDNN = "onednn"
    """torch's oneDNN, of bfloat16 and in bfloat16, product by product."""
    WIDENED = "widened"
    """torch's product of float32, with weights that were widened at load."""

    @property
    def in_pairs(self) -> bool:
        """Whether the instructions for bfloat16 of AVX-512 multiply; attention then has them as well."""
        return self in _IN_PAIRS

    @property
    def is_compressed(self) -> bool:
        """Whether the weights that decodes read are compressed, which changes no bit of a result."""
        return self in _COMPRESSED or self is Bfloat16Product.MIXED

    @property
    def uncompressed(self) -> "Bfloat16Product":
        """What gives the same results with weights that lie plain; itself where they do."""
        return _COMPRESSED.get(self, self)


_COMPRESSED = {
    Bfloat16Product.COMPRESSED_PANELS: Bfloat16Product.PANELS,
    Bfloat16Product.COMPRESSED_PAIRS: Bfloat16Product.PAIRS,
}
_IN_PAIRS = (
    Bfloat16Product.PAIRS,
    Bfloat16Product.COMPRESSED_PAIRS,
    Bfloat16Product.MIXED,
    Bfloat16Product.AMX,
)

AUTO = "auto"
FEW_TOKENS = 32
"""Of `ROWS`: a step of more has prompts in it, and its time is that of multiplying,
no longer that of reading weights.
"""
_MIXED_OF = (Bfloat16Product.COMPRESSED_PAIRS, Bfloat16Product.ONEDNN)
IN_PANELS = (
    Bfloat16Product.PANELS,
    Bfloat16Product.PAIRS,
    Bfloat16Product.COMPRESSED_PANELS,
    Bfloat16Product.COMPRESSED_PAIRS,
    Bfloat16Product.AMX,
)
"""Those whose weights are `BFloat16Panels` and nothing else."""
COMPUTED_IN = {
    Bfloat16Product.PANELS: torch.float32,
    Bfloat16Product.PAIRS: torch.bfloat16,
    Bfloat16Product.COMPRESSED_PANELS: torch.float32,
    Bfloat16Product.COMPRESSED_PAIRS: torch.bfloat16,
    Bfloat16Product.MIXED: torch.bfloat16,
    Bfloat16Product.AMX: torch.bfloat16,
    Bfloat16Product.ONEDNN: torch.bfloat16,
    Bfloat16Product.WIDENED: torch.float32,
}
"""The dtype of activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What was measured on a processor.

    Attributes:
        milliseconds: Of each product, the shortest time for every number of `ROWS`.
        unkept: Why other processes cannot read it; empty where they can.
    """

    milliseconds: Mapping[Bfloat16Product, Sequence[float]]
    unkept: str = ""

    def fastest(self, *, one_for_all: bool = False) -> Bfloat16Product:
        """By the geometric mean over `ROWS`; compressed weights unless plain ones are faster by more than
        `_WORTH_PLAIN_WEIGHTS`, `MIXED` where it is faster than any other by more than `_WORTH_MORE_MEMORY`.

        Args:
            one_for_all: A row's bits must not depend on how many there are: then it is never `MIXED`.
        """
        single = min(self.milliseconds, key=self._worth)
        if one_for_all or not _can_mix(self.milliseconds):
            return single
        gain = self._mean(single) / self._mean(Bfloat16Product.MIXED)
        return Bfloat16Product.MIXED if gain > _WORTH_MORE_MEMORY else single

    def advantage(self) -> float:
        """How many times as fast as the next one the fastest is."""
        fastest = self.fastest()
        others = [self._mean(name) for name in self.milliseconds if name is not fastest]
        return min(others) / self._mean(fastest)

    def _worth(self, name: Bfloat16Product) -> float:
        return self._mean(name) / (_WORTH_PLAIN_WEIGHTS if name in _COMPRESSED else 1)

    def _mean(self, name: Bfloat16Product) -> float:
        return math.exp(math.fsum(map(math.log, self._times(name))) / len(ROWS))

    def _times(self, name: Bfloat16Product) -> Sequence[float]:
        if name is not Bfloat16Product.MIXED:
            return self.milliseconds[name]
        few, many = (self.milliseconds[part] for part in _MIXED_OF)
        return [few[i] if rows <= FEW_TOKENS else many[i] for i, rows in enumerate(ROWS)]


def possible_products() -> tuple[Bfloat16Product, ...]:
    """Those that may be the fastest here."""
    possible: list[Bfloat16Product] = []
    if reads_bfloat16():
        possible += [Bfloat16Product.PANELS, Bfloat16Product.COMPRESSED_PANELS]
    if multiplies_bfloat16():
        possible += [Bfloat16Product.PAIRS, Bfloat16Product.COMPRESSED_PAIRS]
    native_bfloat16 = {"amx_bf16", "avx512_bf16"} & cpu_flags()
    if native_bfloat16 and torch.backends.mkldnn.is_available():
        possible.append(Bfloat16Product.ONEDNN)
    if not built_for("avx512f"):  # with AVX-512 panels take half the time and never more
        possible.append(Bfloat16Product.WIDENED)
    return tuple(possible) or (Bfloat16Product.WIDENED,)


def selectable_products() -> tuple[Bfloat16Product, ...]:
    """Those that run here, `MIXED` where both its parts do."""
    possible = possible_products()
    mixed = (Bfloat16Product.MIXED,) if _can_mix(possible) else ()
    amx = (Bfloat16Product.AMX,) if why_no_tiles() is None else ()
    return tuple(dict.fromkeys((*possible, *mixed, *amx, Bfloat16Product.WIDENED)))


def _can_mix(products: Iterable[Bfloat16Product]) -> bool:
    return set(_MIXED_OF) <= set(products)


def rounding(product: Bfloat16Product) -> str:
    """What decides the bits of a result on this CPU: the product, the instructions that our kernels are built for,
    and torch's, and which builds of both they are.
    """
    builds = [str(torch.__version__)]
    try:
        kernels = native.built_variant(native.CPU_KERNELS).name
        builds.append(native.digest(native.CPU_KERNELS))
    except native.NotBuiltError:
        kernels = "none"
    capability = torch.backends.cpu.get_cpu_capability().lower()
    return f"{product.uncompressed}-{kernels}-{capability}-{sha256(' '.join(builds).encode()).hexdigest()[:12]}"


def choose_product(
    asked: str, device: torch.device, *, is_used: bool = True, must_agree: bool = False
) -> Bfloat16Product:
    """The product to use. Blocks for a second or a few where several may be the fastest and they were not compared here
    yet.

    Args:
        asked: `auto`, or the name of a product.
        device: Where the model will run; on a GPU the answer is of no consequence, and nothing is measured.
        is_used: Whether weights are held as bfloat16; otherwise likewise.
        must_agree: Whether every worker here has to choose the same:
            then `auto` needs a place to keep what was measured.

    Raises:
        ConfigError: That product does not run here; or `auto` may give another one to the next worker.
    """
    if device.type != "cpu":
        return Bfloat16Product.WIDENED
    possible = possible_products()
    if asked != AUTO:
        if asked not in selectable_products():
            names = ", ".join((AUTO, *selectable_products()))
            reason = f", and {why_no_tiles()}" if asked == Bfloat16Product.AMX else ""
            raise ConfigError(
                f"cpu_product is {asked}{reason}; this processor and installation run {names}",
                param="engine.cpu_product",
            )
        if asked == Bfloat16Product.MIXED and must_agree:
            raise ConfigError(
                "cpu_product is mixed: which of its two products computes a row depends on the other rows of the step,"
                f" which deterministic rules out; give {' or '.join(possible)}",
                param="engine.cpu_product",
            )
        if asked == Bfloat16Product.AMX:
            logger.warning(
                "cpu_product is amx, which took longer than mixed where both were measured"
            )
        return Bfloat16Product(asked)
    if not is_used:
        return Bfloat16Product.WIDENED
    if len(possible) == 1:
        return possible[0]
    comparison = measured(possible)
    if must_agree and comparison.unkept:
        raise ConfigError(
            f"cpu_product is auto, and what is measured cannot be kept ({comparison.unkept}): beside deterministic"
            f" all workers have to choose the same; give them one of {', '.join(possible)}",
            param="engine.cpu_product",
        )
    return comparison.fastest(one_for_all=must_agree)


def measured(possible: Sequence[Bfloat16Product]) -> Comparison:
    """The comparison of `possible` on this processor: from the cache directory, or made now and put there. Processes
    that start at the same time wait for one of them.
    """
    try:
        path = _cache_directory() / f"products-{_key(possible)}.json"
        if (kept := _read(path, possible)) is not None:
            return kept
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_suffix(".lock"))
        lock.acquire(_LOCK_TIMEOUT_S)
    except (OSError, RuntimeError) as error:  # read-only, or no home: measured at each start
        return _unkept(compare(possible), error)
    try:
        if (kept := _read(path, possible)) is not None:
            return kept
        comparison = compare(possible)
        try:
            _write(path, comparison)
        except OSError as error:
            return _unkept(comparison, error)
        return comparison
    finally:
        lock.release()


def _unkept(comparison: Comparison, error: Exception) -> Comparison:
    logger.info("the comparison of CPU products is not kept: %s", error)
    return replace(comparison, unkept=str(error))


def compare(possible: Sequence[Bfloat16Product]) -> Comparison:
    """Times the products in turn, on one thread and by its processor time:
    what else the machine does then counts little.
    """
    weights = [torch.randn(_OUTPUTS, _INPUTS).bfloat16() for _ in range(_MATRICES)]
    multiplying = {name: [_product(name, weight) for weight in weights] for name in possible}
    inputs = {
        name: [torch.randn(rows, _INPUTS, dtype=COMPUTED_IN[name]) for rows in ROWS]
        for name in possible
    }
    best = {name: [math.inf] * len(ROWS) for name in possible}
    swept = torch.zeros(_SWEPT_BYTES // 8, dtype=torch.int64)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _, index, name in product(range(_ROUNDS), range(len(ROWS)), possible):
            if ROWS[index] <= FEW_TOKENS:
                swept.sum()
            taken = _milliseconds(multiplying[name], inputs[name][index])
            best[name][index] = min(best[name][index], taken)
    finally:
        torch.set_num_threads(threads)
    comparison = Comparison(milliseconds=best)
    logger.info("bfloat16 products of this CPU, ms for %s tokens: %s", ROWS, _lines(comparison))
    return comparison


@torch.inference_mode()
def _milliseconds(products: Sequence[Product], x: torch.Tensor) -> float:
    began_s = time.thread_time()
    for multiply in products:
        multiply(x)
    return 1e3 * (time.thread_time() - began_s)


def _product(name: Bfloat16Product, weight: torch.Tensor) -> Product:
    if name in IN_PANELS:
        return BFloat16Panels.pack(weight, None, pairs=name.in_pairs, compressed=name.is_compressed)
    if name is Bfloat16Product.WIDENED:
        weight = weight.float()
        if not torch.backends.mkldnn.is_available():
            return partial(functional.linear, weight=weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS[2])

    def multiply(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
        return result

    return multiply


def _cache_directory() -> Path:
    """As the XDG base directory specification has it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"


def _key(possible: Sequence[Bfloat16Product]) -> str:
    """Of everything that the times depend on, other than the load of the machine."""
    facts = (
        cpu_name(),
        *sorted(cpu_flags()),
        torch.__version__,
        native.digest(native.CPU_KERNELS),
        *map(str, _METHOD),
        *possible,
    )
    return sha256("\n".join(facts).encode()).hexdigest()[:16]


def _read(path: Path, possible: Sequence[Bfloat16Product]) -> Comparison | None:
    """None where nothing was kept, or something that cannot be right."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        times = {name: [float(value) for value in kept[name]] for name in possible}
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if not all(
        len(row) == len(ROWS) and all(0 < ms < math.inf for ms in row) for row in times.values()
    ):
        return None
    return Comparison(milliseconds=times)


def _write(path: Path, comparison: Comparison) -> None:
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(dict(comparison.milliseconds)), encoding="utf-8")
    unfinished.replace(path)


def _lines(comparison: Comparison) -> str:
    return "; ".join(
        f"{name} " + " ".join(f"{ms:.1f}" for ms in row)
        for name, row in comparison.milliseconds.items()
    )


def main() -> None:
    """Says in a line what is chosen here, and whether AMX's tiles can be asked for."""
    possible = possible_products()
    line = str(possible[0])
    if len(possible) > 1:
        comparison = measured(possible)
        line = f"{comparison.fastest()}, {comparison.advantage():.1f} times as fast as the next of {len(possible)}"
    reason = why_no_tiles()
    tiles = (
        "amx if asked for, which took longer than mixed where both were measured"
        if reason is None
        else f"no amx: {reason}"
    )
    sys.stdout.write(f"{line}; {tiles}\n")


if __name__ == "__main__":
    main()

"""`engine.compile`: what a step computes once, between its kernels, fused by `torch.compile`.
At the start of an engine on a GPU.

    positions ─▶ cosines and sines        logits ─▶ likeliest tokens        some ten small kernels become two

Nothing else is left to a compiler: norms with their residual sums, the rotation with the page write, and the gate are
kernels already, and products are a library's. What is compiled here is plain torch, so that a step from a CUDA graph is
captured with it like without.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import ParamSpec, TypeVar

import torch

from baton.config.schema import EngineConfig
from baton.errors import ConfigError
from baton_engine.device import computing_on
from baton_engine.models.decoder import Decoder

P = ParamSpec("P")
T = TypeVar("T")
_ROWS = (1, 4)
"""Steps of one row are compiled apart from all others."""


def check_compile(config: EngineConfig, device: torch.device) -> None:
    """Says whether `engine.compile` means anything here.

    Raises:
        ConfigError: It does not: on a CPU the layers are compiled C++ already; and what is fused may round otherwise,
            which a request that is to get the same bits everywhere does not bear.
    """
    if not config.compile:
        return
    if device.type != "cuda":
        raise ConfigError(f"compile is for GPUs, not for {device.type}", param="engine.compile")
    if config.deterministic:
        raise ConfigError("compile and deterministic exclude each other", param="engine.compile")


def compile_glue(decoder: Decoder) -> Decoder:
    """`decoder`, its rotation and its likeliest tokens compiled. Blocks, for up to a minute where nothing is cached.

    Raises:
        ConfigError: There is no compiler, or it failed; says what it said.
    """
    compiled = replace(decoder, rotary=decoder.rotary.through(_fuse), greedy=_fuse(decoder.greedy))
    try:
        with computing_on(decoder.device):
            _compute(compiled)
    except (RuntimeError, OSError) as error:
        raise ConfigError(
            f"compile: torch cannot compile here: {_first_line(error)}", param="engine.compile"
        ) from error
    return compiled


def _fuse(work: Callable[P, T]) -> Callable[P, T]:
    # One thread, since more would be processes, which stay and which nothing here would end.
    fused: Callable[P, T] = torch.compile(
        work, fullgraph=True, dynamic=True, options={"compile_threads": 1}
    )
    return fused


@torch.inference_mode()
def _compute(decoder: Decoder) -> None:
    """As the first steps would, so that no request waits for a compiler."""
    for rows in _ROWS:
        decoder.rotary(torch.zeros(rows, dtype=torch.int64, device=decoder.device))
        decoder.greedy(torch.zeros(rows, decoder.spec.vocab_size, device=decoder.device))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)

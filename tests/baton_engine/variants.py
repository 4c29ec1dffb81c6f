"""Counts the variants of Triton's kernels that steps ask for, without a GPU: `python -m tests.baton_engine.variants STEPS`.

Triton compiles a kernel anew for arguments that it has not seen the like of: for each dtype, and for numbers that are 1 or multiples of
16, and addresses that are, unless the kernel forbids it. What a launch would compile is asked of Triton itself; nothing is compiled or run, so
that outputs mean nothing. A process of its own, because the tests' may have told Triton to interpret.

Writes JSON: of each kernel, the steps in which variants were first asked for; -1 is before the first, when an engine warms up.
"""

import json
import random
import sys
from collections import defaultdict
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget

from baton.generation import Prompt, SamplingParams
from baton.ids import BlockId, SeqId
from baton_engine.cache.arena import KvArena
from baton_engine.kernels.triton.kernel_set import TritonKernels
from baton_engine.kernels.triton.page_sum import PageSums, sum_pages
from baton_engine.kernels.triton.random_draw import random_draw
from baton_engine.messages import Generate
from baton_engine.models.config import kv_layout
from baton_engine.models.inputs import InputBuilder
from baton_engine.runner import ModelRunner
from baton_engine.sampling.draws import draw_with_triton
from baton_engine.scheduling.plan import Row
from baton_engine.scheduling.request import Request
from baton_engine.warm_up import warm_up
from bench.gpu.models import GpuShape, random_decoder

_CPU = torch.device("cpu")
_BLOCK_TOKENS, _LONGEST, _MOST_ROWS = 16, 400, 20
_SHAPE = GpuShape(
    hidden=64, intermediate=96, layers=1, heads=4, kv_heads=2, head_dim=16,
    vocab=256, bias=True, tied=False,
)  # fmt: skip


class _Driver:
    """What Triton asks of a driver before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Variants:
    """Notes in which steps kernels ask for variants that they had not asked for."""

    def __init__(self) -> None:
        self.step = -1
        self.first_steps: dict[str, list[int]] = defaultdict(list)
        self._seen: set[tuple[str, str]] = set()

    def asked(self, *, key: str, fn: Any, **_: Any) -> bool:
        """Triton's `jit_cache_hook`; true so that nothing is compiled."""
        if (fn.name, key) not in self._seen:
            self._seen.add((fn.name, key))
            self.first_steps[fn.name].append(self.step)
        return True


def main() -> None:
    """Replays as many random steps as are asked for."""
    variants = Variants()
    triton.runtime.driver.set_active(_Driver())
    triton.knobs.runtime.jit_cache_hook = variants.asked
    numbers = random.Random(0)
    decoder = random_decoder(
        _SHAPE, TritonKernels(multiprocessors=8), _CPU, torch.float16, _LONGEST
    )
    layout = kv_layout(decoder.spec, torch.float16, _BLOCK_TOKENS)
    pages = _MOST_ROWS * -(-_LONGEST // _BLOCK_TOKENS)
    arena = KvArena(layout, pages, memoryview(bytearray(layout.region_bytes(pages))))
    rule = decoder.kernels.split_rule(_SHAPE.heads, arena.layer(0))
    builder = InputBuilder(_BLOCK_TOKENS, pages, _CPU, rule)
    with patch("baton_engine.runner.choose_draw", lambda device: draw_with_triton):
        runner = ModelRunner(decoder, arena)
    warm_up(runner, block_tokens=_BLOCK_TOKENS, page_kernels=None)
    PageSums([arena.page_bytes(0)]).of_layer(0, [0])
    with torch.inference_mode():
        for variants.step in range(int(sys.argv[1])):
            rows = _rows(numbers, pages)
            decoder.forward(builder.build(rows), arena)
            _draw(numbers, len(rows))
            _sum(numbers, arena)
    json.dump(variants.first_steps, sys.stdout)


def _rows(numbers: random.Random, pages: int) -> list[Row]:
    """Decodes, chunks, or both, of any length, as schedulers mix them: decodes first."""
    kinds = numbers.choice(((0, 1), (1, 0), (1, 1)))
    decodes = numbers.randint(1, _MOST_ROWS - 4) * kinds[0]
    chunks = numbers.randint(1, 4) * kinds[1]
    width = -(-_LONGEST // _BLOCK_TOKENS)
    free = list(range(pages))
    numbers.shuffle(free)
    rows = []
    for number in range(decodes + chunks):
        context = numbers.randint(1, _LONGEST)
        computed = 1 if number < decodes else numbers.randint(1, context)
        prompt = Prompt(prompt_tokens=(1,) * context, sampling=SamplingParams(max_tokens=1))
        asked = Generate(seq_id=SeqId(str(number)), prompt=prompt)
        sequence = Request(asked=asked).first_sequence()
        sequence.blocks += [BlockId(page) for page in free[number * width : (number + 1) * width]]
        rows.append(Row(seq=sequence, start=context - computed, num_tokens=computed, samples=(0,)))
    return rows


def _draw(numbers: random.Random, rows: int) -> None:
    drawn = numbers.randint(1, rows)
    samples, filtering = numbers.randint(1, 5), numbers.randint(0, drawn)
    filters = (
        torch.zeros(filtering, dtype=torch.int64),
        torch.ones(filtering, dtype=torch.float64),
        torch.zeros(filtering),
    )
    random_draw(
        torch.zeros(rows, _SHAPE.vocab),
        torch.zeros(rows, 1),
        torch.zeros(drawn, dtype=torch.int64),
        torch.ones(drawn),
        torch.zeros(drawn, samples, dtype=torch.float64),
        filters if filtering else None,
        with_top_k=numbers.random() < 0.5,
        with_top_p=numbers.random() < 0.5,
    )


def _sum(numbers: random.Random, arena: KvArena) -> None:
    pages = arena.page_bytes(0)
    begin = 8 * numbers.randrange(pages.shape[1] // 16)
    chosen = torch.zeros(numbers.randint(1, 40), dtype=torch.int64)
    sum_pages(pages, chosen, begin // 8)


if __name__ == "__main__":
    main()

"""Where the GPU's day runs, and how large: on a GPU in the shapes of models,
elsewhere in miniature under Triton's interpreter.

Without a GPU nothing that comes out says anything about one: it shows that every stage runs to its end.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from baton_engine.cuda_graphs import CudaGraphs, GraphBackend
from baton_engine.kernels.ports import KernelSet
from baton_engine.kernels.select import select_kernels
from bench.gpu.models import GPU_SHAPES, GpuShape
from bench.gpu.timing import CudaTimer, Timer

T = TypeVar("T")
_MINIATURE = GpuShape(
    hidden=64, intermediate=96, layers=2, heads=4, kv_heads=2, head_dim=16,
    vocab=256, bias=True, tied=False,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A device and the sizes that suit it.

    Attributes:
        device: Where everything is computed.
        dtypes: Of activations; the first is the one that is timed.
        shapes: Whose kernels are checked; the first is the one that is timed.
        contexts: Tokens of the decodes whose attention is checked.
        prompts: Queries and context of the chunks that are checked.
        block_tokens: Per page.
        prefills: Tokens of the prompts that are timed.
        decode_context: Tokens before each decode that is timed.
        batches: Decodes of a step that is timed.
        sequences: That run through the engine's loop at once.
        prompt_tokens: Of each of them.
        output_tokens: Of each of them.
    """

    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[GpuShape, ...]
    contexts: tuple[int, ...]
    prompts: tuple[tuple[int, int], ...]
    block_tokens: int
    prefills: tuple[int, ...]
    decode_context: int
    batches: tuple[int, ...]
    sequences: int
    prompt_tokens: int
    output_tokens: int

    @property
    def on_gpu(self) -> bool:
        """Whether the figures are of a GPU."""
        return self.device.type == "cuda"

    @property
    def longest(self) -> int:
        """Tokens of the longest text that is timed."""
        return max(*self.prefills, self.decode_context, self.prompt_tokens + self.output_tokens)

    def kernels(self, dtype: torch.dtype) -> KernelSet:
        """The GPU's kernels; under the interpreter where there is none."""
        if self.on_gpu:
            return select_kernels(self.device, dtype)
        from baton_engine.kernels.triton.kernel_set import TritonKernels

        return TritonKernels(multiprocessors=2)

    def timer(self) -> Timer:
        """What times work here."""
        return CudaTimer() if self.on_gpu else OneCall()

    def graphs(self) -> GraphBackend:
        """What captures work here."""
        return CudaGraphs() if self.on_gpu else Again()

    def wait(self) -> None:
        """Blocks until the device has done all that it was given."""
        if self.on_gpu:
            torch.cuda.synchronize()


class OneCall:
    """A `Timer` by the clock, of one call each: nothing is learnt from the interpreter's time."""

    def device_s(self, work: Callable[[], object]) -> float:
        """See `Timer`."""
        begin_s = time.perf_counter()
        work()
        return time.perf_counter() - begin_s

    wall_s = device_s


class Again:
    """A `GraphBackend` that does the work again."""

    def capture(self, work: Callable[[], T]) -> Callable[[], T]:
        """See `GraphBackend.capture`."""
        work()
        return work


def find_place() -> Place:
    """The first GPU, or this machine's memory in its place."""
    if torch.cuda.is_available():
        return Place(
            device=torch.device("cuda", torch.cuda.current_device()),
            dtypes=(torch.bfloat16, torch.float16),
            shapes=(GPU_SHAPES["llama8b"], GPU_SHAPES["qwen7b"], GPU_SHAPES["qwen500m"]),
            contexts=(1, 63, 64, 65, 8192, 32_768),
            prompts=((65, 65), (130, 200), (512, 8192)),
            block_tokens=64,
            prefills=(2048, 8192),
            decode_context=1024,
            batches=(1, 64, 8),
            sequences=64,
            prompt_tokens=512,
            output_tokens=128,
        )
    return Place(
        device=torch.device("cpu"),
        dtypes=(torch.float16,),  # the interpreter computes bfloat16 wrongly
        shapes=(_MINIATURE,),
        contexts=(1, 63, 64, 65, 130),
        prompts=((65, 65), (30, 100)),
        block_tokens=16,
        prefills=(32, 64),
        decode_context=40,
        batches=(1, 4),
        sequences=4,
        prompt_tokens=20,
        output_tokens=6,
    )

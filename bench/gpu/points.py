"""What `bench.gpu_roofline` measures of one model: its decode, its prefill, and the kernels alone."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from baton.generation import Prompt, SamplingParams
from baton.ids import BlockId, SeqId
from baton_engine.cache.arena import KvArena
from baton_engine.cuda_graphs import GraphBackend, StepGraphs
from baton_engine.messages import Generate
from baton_engine.models.config import kv_layout
from baton_engine.models.decoder import Decoder, DecoderInput
from baton_engine.models.inputs import InputBuilder
from baton_engine.models.prepare import prepare_decoder
from baton_engine.runner import ModelRunner
from baton_engine.scheduling.plan import Row, StepPlan
from baton_engine.scheduling.request import Request
from bench.gpu.models import Ceilings, GpuShape
from bench.gpu.timing import Timer

_NUMBERS_OF_8_BITS = 0x58
"""Bytes below are numbers from 0 to 15."""
_PARAMS = SamplingParams(temperature=0, max_tokens=1)
IN_FLIGHT = 16
"""Steps that are timed together, so that the first one's launch, which nothing hides, weighs little."""
_CACHES = 64 << 20
"""Bytes; an H200's second-level cache has 60 MB."""
_BEYOND_CACHES = 4 * _CACHES


class ModelBench:
    """Measures one decoder on one device.

    Args:
        shape: Its dimensions.
        model: The decoder.
        num_blocks: Pages to take; they are filled with random keys and values.
        kv_dtype: Of the pages.
        block_tokens: Per page.
        most_rows: Of a decode step.
        longest: Longest context, in tokens.
        timer: Times.
        graphs: Captures.
        ceilings: What figures are shares of.
    """

    def __init__(
        self,
        shape: GpuShape,
        model: Decoder,
        *,
        num_blocks: int,
        kv_dtype: torch.dtype,
        block_tokens: int,
        most_rows: int,
        longest: int,
        timer: Timer,
        graphs: GraphBackend,
        ceilings: Ceilings,
    ) -> None:
        self._shape, self._model = shape, model
        self._scales = model.layers[0].attention.scales
        self._timer, self._graphs, self._ceilings = timer, graphs, ceilings
        self._block_tokens, self._num_blocks = block_tokens, num_blocks
        self._kv_token_bytes = shape.kv_token_elements * kv_dtype.itemsize
        layout = kv_layout(model.spec, kv_dtype, block_tokens)
        size = layout.region_bytes(num_blocks)
        memory = torch.empty(size, dtype=torch.uint8, device=model.device)
        if kv_dtype.itemsize == 1:
            memory.random_(_NUMBERS_OF_8_BITS)
        else:
            memory.view(kv_dtype).normal_()
        self._arena = KvArena(layout, num_blocks, _buffer(memory))
        rule = prepare_decoder(model, self._arena)
        self._inputs = InputBuilder(block_tokens, num_blocks, model.device, rule)
        captured = StepGraphs(
            model,
            self._arena,
            most_rows=most_rows,
            table_width=-(-longest // block_tokens),
            backend=graphs,
        )
        self._runner = ModelRunner(model, self._arena, graphs=captured)

    def fits(self, batch: int, context: int) -> bool:
        """Whether the pages suffice for so many contexts."""
        return batch * -(-context // self._block_tokens) <= self._num_blocks

    def outgrows_caches(self, batch: int, context: int) -> bool:
        """Whether the keys and values of all layers do: only then is attention alone one that reads memory."""
        return self._shape.layers * self._kv_token_bytes * batch * context > _CACHES

    @torch.inference_mode()
    def decode(self, batch: int, context: int) -> dict[str, float]:
        """A decode step as the loop on a GPU runs it, launched before the one before it is read;
        the same by itself, from plan to tokens on the host; and its kernels without the host.
        """
        inputs = self._inputs.build(self._rows(batch, context, num_tokens=1))
        repeat = self._graphs.capture(lambda: self._model.forward(inputs, self._arena))
        step_s = self._timer.wall_s(self._in_flight(batch, context)) / IN_FLIGHT
        alone_s = self._timer.wall_s(self.decode_work(batch, context))
        kernels_s = self._timer.device_s(repeat)
        least_s = self._shape.decode_floor_s(batch, context, self._kv_token_bytes, self._ceilings)
        return {
            "tok_s": batch / step_s,
            "step_ms": step_s * 1e3,
            "fraction": least_s / step_s,
            "alone_ms": alone_s * 1e3,
            "alone_fraction": least_s / alone_s,
            "kernels_fraction": least_s / kernels_s,
            "overhead": 1 - kernels_s / step_s,
        }

    def _in_flight(self, batch: int, context: int) -> Callable[[], object]:
        """`IN_FLIGHT` decode steps, each launched before the tokens of the one before it are read
        (`engine.plan_ahead`).
        """
        rows = self._rows(batch, context, num_tokens=1)
        first = StepPlan(step=0, rows=rows)
        further = StepPlan(step=0, rows=rows, follows=tuple(range(batch)))

        def work() -> object:
            launched = self._runner.launch(first)
            for _ in range(IN_FLIGHT - 1):
                following = self._runner.launch(further)
                launched()
                launched = following
            return launched()

        return work

    def decode_work(self, batch: int, context: int) -> Callable[[], object]:
        """A decode step, from plan to tokens on the host."""
        plan = StepPlan(step=0, rows=self._rows(batch, context, num_tokens=1))
        return partial(self._runner.execute, plan)

    def prefill_work(self, tokens: int) -> Callable[[], object]:
        """A whole prompt in one chunk, to the logits of its last token."""
        inputs = self._inputs.build(self._rows(1, tokens, num_tokens=tokens))
        return partial(self._model.forward, inputs, self._arena)

    @torch.inference_mode()
    def decode_attention(self, batch: int, context: int) -> dict[str, float]:
        """The decode attention alone: bytes of the KV that it reads against the rate of reading."""
        inputs = self._inputs.build(self._rows(batch, context, num_tokens=1))
        seconds = self._timer.device_s(self._attending(inputs)) / self._shape.layers
        rate = self._kv_token_bytes * batch * context / seconds
        return {"us": seconds * 1e6, "fraction": rate / self._ceilings.read}

    @torch.inference_mode()
    def prefill(self, tokens: int) -> dict[str, float]:
        """A whole prompt in one chunk, to the logits of its last token."""
        seconds = self._timer.device_s(self.prefill_work(tokens))
        rate = self._shape.prefill_flops(tokens) / seconds
        return {"tok_s": tokens / seconds, "fraction": rate / self._ceilings.matmul}

    @torch.inference_mode()
    def prefill_attention(self, tokens: int) -> dict[str, float]:
        """The prefill attention alone, against the matmul rate."""
        inputs = self._inputs.build(self._rows(1, tokens, num_tokens=tokens))
        seconds = self._timer.device_s(self._attending(inputs)) / self._shape.layers
        rate = self._shape.attention_flops(tokens) / seconds
        return {"tflop_s": rate / 1e12, "fraction": rate / self._ceilings.matmul}

    @torch.inference_mode()
    def fused(self, tokens: int) -> dict[str, dict[str, float]]:
        """The kernels that only move memory, each as a share of the copy rate, over so many tokens."""
        shape, kernels, model = self._shape, self._model.kernels, self._model
        inputs = self._inputs.build(self._rows(1, tokens, num_tokens=tokens))
        heads = shape.heads + 2 * shape.kv_heads
        norm, rotation = model.final_norm, model.rotary(inputs.positions)
        slots, layers = inputs.batch.slots, shape.layers
        residuals = self._copies(tokens, shape.hidden)
        works: dict[str, tuple[Callable[[int, torch.Tensor], torch.Tensor], int, int]] = {
            "rms_norm": (
                lambda turn, x: norm.add(x, residuals[turn]),
                shape.hidden,
                4 * shape.hidden,
            ),
            "silu_mul": (
                lambda _, gates: kernels.silu_mul(gates),
                2 * shape.intermediate,
                3 * shape.intermediate,
            ),
            "rotate_and_store": (
                lambda turn, qkv: kernels.rotate_and_store(
                    qkv, rotation, None, self._arena.layer(turn % layers), slots, self._scales
                ),
                heads * shape.head_dim,
                2 * heads * shape.head_dim,
            ),
        }
        figures = {}
        for name, (work, width, elements) in works.items():
            copies = self._copies(tokens, width)
            seconds = self._timer.device_s(self._graphs.capture(partial(_in_turn, work, copies)))
            seconds /= len(copies)
            rate = tokens * elements * model.dtype.itemsize / seconds
            figures[name] = {"us": seconds * 1e6, "fraction": rate / self._ceilings.copy}
        return figures

    def _copies(self, tokens: int, width: int) -> list[torch.Tensor]:
        """So many inputs that none is still in a cache when it is its turn again."""
        model = self._model
        size = tokens * width * model.dtype.itemsize
        count = -(-_BEYOND_CACHES // size) if model.device.type == "cuda" else 1
        x = torch.randn(tokens, width, device=model.device).to(model.dtype)
        return [x.clone() for _ in range(count)]

    def _attending(self, inputs: DecoderInput) -> Callable[[], torch.Tensor]:
        """Attention of all layers, one after the other, so that no layer's pages are still in a cache."""
        shape, kernels = self._shape, self._model.kernels
        tokens, scale = inputs.tokens.shape[0], shape.head_dim**-0.5
        query = torch.randn(tokens, shape.heads, shape.head_dim, device=self._model.device)
        query = query.to(self._model.dtype)

        def work() -> torch.Tensor:
            out = query
            for layer in range(shape.layers):
                pages = self._arena.layer(layer)
                out = kernels.paged_attention(query, pages, inputs.batch, scale, None, self._scales)
            return out

        return self._graphs.capture(work)

    def _rows(self, batch: int, context: int, *, num_tokens: int) -> tuple[Row, ...]:
        """Rows of their own pages, scattered, that compute the last tokens of their contexts."""
        needed = -(-context // self._block_tokens)
        order = torch.randperm(self._num_blocks, generator=torch.Generator().manual_seed(0))
        pages = [BlockId(page) for page in order[: batch * needed].tolist()]
        prompt = Prompt(prompt_tokens=(1,) * context, sampling=_PARAMS)
        rows = []
        for index in range(batch):
            request = Request(asked=Generate(seq_id=SeqId(str(index)), prompt=prompt))
            seq = request.first_sequence()
            seq.blocks += pages[index * needed : (index + 1) * needed]
            rows.append(
                Row(seq=seq, start=context - num_tokens, num_tokens=num_tokens, samples=(0,))
            )
        return tuple(rows)


def _buffer(memory: torch.Tensor) -> memoryview | torch.Tensor:
    return memory if memory.device.type == "cuda" else memory.numpy().data


def _in_turn(
    work: Callable[[int, torch.Tensor], torch.Tensor], inputs: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The work over each input; gives the last result."""
    for turn, x in enumerate(inputs):
        out = work(turn, x)
    return out

"""Small steps as CUDA graphs: the kernels of a whole step in one launch, where launching them one by one takes longer
than they do. Between the runner, which has a plan, and the model.

A graph repeats what was captured, at the same addresses. So there is one per shape of a step (a bucket), and its inputs
lie in tensors that stay. Rows that fill up a bucket are padding: they have no context, and their keys and values go
nowhere. Steps of nothing but decodes have buckets by rows;
those with short prompts in them by the rows that decode and by the tokens of the prompts.

    rows      7            ─▶  bucket 8    captured at start: 1 2 4 8 16 24 ... 64 96 128 ...
    contexts  5 900 .. 31      5 900 .. 31 0

    decodes   5, prompts 20 + 9 tokens  ─▶  bucket 8 + 32     captured at start: (0 8 32 128 ...) by (16 32 64 128)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from baton_engine.cache.arena import DrafterPages, KvArena
from baton_engine.kernels.ports import PagedBatch
from baton_engine.kernels.splits import Splits
from baton_engine.models.decoder import Decoder, DecoderInput, HiddenObserver
from baton_engine.models.inputs import InputBuilder, Padding, Unseen, num_decodes
from baton_engine.models.prepare import prepare_decoder
from baton_engine.scheduling.plan import Row, StepPlan

T = TypeVar("T")
_FINE_UP_TO = 64
_FINE, _COARSE = 8, 32
SMALL_PROMPTS = 128
"""Most tokens of prompts in a step that is repeated from a graph. A guess, not measured yet: about as many as are
computed in the time that launching the kernels takes.
"""
_FEWEST_CHUNK_TOKENS = 16
MOST_CHUNKS = 4
"""Most prompts in a step that is repeated from a graph."""


class GraphBackend(Protocol):
    """Captures work on a device."""

    def capture(self, work: Callable[[], T]) -> Callable[[], T]:
        """Runs `work` some times, and gives what repeats it: same addresses read,
        same tensors written and given back.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What a graph computes of its rows.

    Attributes:
        logits: `[num_rows, vocab]` float32.
        greedy: `[num_rows]` int64, their likeliest tokens (`greedy_tokens`).
    """

    logits: torch.Tensor
    greedy: torch.Tensor


def bucket_sizes(most: int) -> tuple[int, ...]:
    """Numbers of rows, rising up to `most`, that graphs are captured for."""
    sizes = [1, 2, 4, *range(_FINE, _FINE_UP_TO, _FINE), *range(_FINE_UP_TO, most, _COARSE)]
    return (*(size for size in sizes if size < most), most)


def mixed_sizes(most_rows: int, most_chunk_tokens: int) -> tuple[Padding, ...]:
    """Shapes of steps with prompts in them that graphs are captured for, rising: by the rows that decode, then by the
    tokens of the prompts.
    """
    decodes, tokens = [8], [_FEWEST_CHUNK_TOKENS]
    while decodes[-1] < most_rows:
        decodes.append(4 * decodes[-1])
    while tokens[-1] < most_chunk_tokens:
        tokens.append(2 * tokens[-1])
    return tuple(
        Padding(decodes=min(rows, most_rows), chunks=MOST_CHUNKS, chunk_tokens=count)
        for rows in (0, *decodes)
        for count in (tokens if most_chunk_tokens else ())
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """One captured graph and its inputs."""

    padding: Padding
    inputs: DecoderInput
    repeat: Callable[[], Scored]


class StepGraphs:
    """Computes the small steps of one model. All graphs are captured here; blocks for some seconds.

    Args:
        model: Its kernels ask nothing of the host.
        arena: The pages; captured by address.
        observer: Reads hidden states in each step; None for none.
        pages: Of `arena`, which the model computes with; None for all of it.
        most_rows: Steps of more rows that decode are not taken.
        most_chunk_tokens: Nor are those of more tokens of prompts; 0 for nothing but decodes. Takes kernels that cut
            the contexts of decodes (`KernelSet.split_rule`), and no observer.
        table_width: Pages of the longest sequence.
        backend: Captures.
    """

    def __init__(
        self,
        model: Decoder,
        arena: KvArena,
        *,
        most_rows: int,
        table_width: int,
        backend: GraphBackend,
        most_chunk_tokens: int = 0,
        pages: DrafterPages | None = None,
        observer: HiddenObserver | None = None,
    ) -> None:
        self._model = model
        self._observer = observer
        self._pages = arena if pages is None else pages
        self._table_width = table_width
        self._rule = prepare_decoder(model, self._pages)
        self._builder = InputBuilder(
            arena.layout.block_tokens,
            arena.num_blocks,
            model.device,
            self._rule,
            page_stride=1 if pages is None else pages.stride,
        )
        mixed = mixed_sizes(most_rows, most_chunk_tokens if self._rule is not None else 0)
        shapes = [*(Padding(decodes=size) for size in bucket_sizes(most_rows)), *mixed]
        # One for all graphs: with a large vocabulary those of each would take more than half a gigabyte together.
        self._logits = torch.empty(
            max(shape.num_rows for shape in shapes),
            model.spec.vocab_size,
            dtype=torch.float32,
            device=model.device,
        )
        # The largest first: the others fit into the memory that it took.
        shapes.sort(key=lambda shape: shape.decodes + shape.chunk_tokens, reverse=True)
        buckets = [self._capture(shape, backend) for shape in shapes]
        self._decodes = [bucket for bucket in reversed(buckets) if not bucket.padding.chunks]
        self._mixed = {
            (bucket.padding.decodes, bucket.padding.chunk_tokens): bucket
            for bucket in buckets
            if bucket.padding.chunks
        }

    def takes(self, plan: StepPlan) -> bool:
        """Whether the step can be repeated from a graph: it is small, scores no prompt,
        and fetches and exports nothing.
        """
        return not plan.fetches and not plan.exports and self.takes_rows(plan.rows)

    def takes_rows(self, rows: Sequence[Row]) -> bool:
        """The same, of what a step computes."""
        return self.padding_of(rows) is not None

    def padding_of(self, rows: Sequence[Row]) -> Padding | None:
        """The shape of the graph that computes a step of `rows`; None where there is none."""
        bucket = self._bucket_of(rows)
        return None if bucket is None else bucket.padding

    @torch.inference_mode()
    def scores(self, rows: Sequence[Row], unseen: Unseen | None = None) -> Scored:
        """Of the next tokens of rows that draw; overwritten by the next step. That one may be asked for while this one
        is computed: the device does one after the other,
        and does not touch a graph's tensors before it is through with them.

        Raises:
            EngineError: A row cannot be computed; nothing was.
        """
        bucket = self._bucket_of(rows)
        assert bucket is not None
        _overwrite(bucket, self._builder.build(rows, bucket.padding, unseen))
        scored = bucket.repeat()
        count = sum(bool(row.samples) for row in rows)
        return Scored(logits=scored.logits[:count], greedy=scored.greedy[:count])

    def _bucket_of(self, rows: Sequence[Row]) -> _Bucket | None:
        """The smallest that has room."""
        decodes = num_decodes(rows)
        chunks = rows[decodes:]
        if not rows or any(row.num_scored for row in rows):
            return None
        if not chunks:
            fitting = (b for b in self._decodes if b.padding.decodes >= decodes)
            return next(fitting, None) if all(row.samples for row in rows) else None
        tokens = sum(row.num_tokens for row in chunks)
        if len(chunks) > MOST_CHUNKS:
            return None
        return min(
            (
                bucket
                for (room, token_room), bucket in self._mixed.items()
                if room >= decodes and token_room >= tokens
            ),
            key=lambda bucket: (bucket.padding.decodes, bucket.padding.chunk_tokens),
            default=None,
        )

    @torch.inference_mode()
    def _capture(self, padding: Padding, backend: GraphBackend) -> _Bucket:
        inputs = self._static(padding)
        rows = len(inputs.logit_tokens)

        def work() -> Scored:
            logits = self._model.forward(
                inputs, self._pages, observer=self._observer, out=self._logits[:rows]
            )
            return Scored(logits=logits, greedy=self._model.greedy(logits))

        return _Bucket(padding=padding, inputs=inputs, repeat=backend.capture(work))

    def _static(self, padding: Padding) -> DecoderInput:
        """Inputs of a step in which every row is padding."""
        decodes, rows = padding.decodes, padding.num_rows
        tokens = decodes + padding.chunk_tokens

        def filled(count: int, value: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full((count,), value, dtype=dtype, device=self._model.device)

        splits = None
        if self._rule is not None and decodes:
            pieces = self._rule.max_pieces(decodes)
            splits = Splits(row_of_piece=filled(pieces, -1), first_piece=filled(decodes + 1, 0))
        starts = torch.arange(rows + 1, dtype=torch.int32, device=self._model.device)
        return DecoderInput(
            tokens=filled(tokens, 0, torch.int64),
            positions=filled(tokens, 0, torch.int64),
            batch=PagedBatch(
                slots=filled(tokens, -1, torch.int64),
                query_starts=starts.clamp_(max=decodes),
                context_lens=filled(rows, 0),
                block_tables=filled(rows * self._table_width, 0).view(rows, self._table_width),
                splits=splits,
            ),
            logit_tokens=torch.arange(rows, device=self._model.device).clamp_(max=tokens - 1),
        )


def _overwrite(bucket: _Bucket, step: DecoderInput) -> None:
    """On the device, where the step's inputs have come in one copy. In a bucket of nothing but decodes rows, their
    first tokens and whose logits are wanted are the same in every step.
    """
    inputs = bucket.inputs
    here, there = inputs.batch, step.batch
    wide = [
        (inputs.tokens, step.tokens),
        (inputs.positions, step.positions),
        (here.slots, there.slots),
    ]
    narrow = [(here.context_lens, there.context_lens)]
    if bucket.padding.chunks:
        wide.append((inputs.logit_tokens, step.logit_tokens))
        narrow.append((here.query_starts, there.query_starts))
    if here.splits is not None and there.splits is not None:
        narrow += [
            (here.splits.row_of_piece, there.splits.row_of_piece),
            (here.splits.first_piece, there.splits.first_piece),
        ]
    for pairs in (wide, narrow):
        torch._foreach_copy_([static for static, _ in pairs], [given for _, given in pairs])
    here.block_tables[:, : there.block_tables.shape[1]].copy_(there.block_tables)


class CudaGraphs:
    """A `GraphBackend` over torch's; all graphs share one pool of memory, since one runs at a time, and are captured on
    one stream, since torch keeps memory for products, 32 MiB of it, for each that it has seen.
    """

    _WARM_UPS = 2

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(self, work: Callable[[], T]) -> Callable[[], T]:
        """See `GraphBackend.capture`. What is compiled or allocated at first use is so before the capture."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(self._WARM_UPS):
                work()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, which hand pages off, may go on calling the driver meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            output = work()

        def repeat() -> T:
            graph.replay()
            return output

        return repeat

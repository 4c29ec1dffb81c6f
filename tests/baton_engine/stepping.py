"""A trivial scheduler for tests of the runner: every sequence prefills in chunks of its own size, then decodes."""

from collections.abc import Iterator
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from itertools import islice

import torch

from baton.generation import SamplingParams, TokenLogprobs
from baton_engine.cache.arena import KvArena
from baton_engine.models.config import kv_layout
from baton_engine.models.decoder import Decoder
from baton_engine.ports import LayerSink
from baton_engine.runner import ModelRunner
from baton_engine.scheduling.plan import Row, StepPlan, StepResult
from baton_engine.scheduling.request import Sequence
from tests.baton_engine.sequences import sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One drawn token."""

    token: int
    logprobs: TokenLogprobs | None = None


def drawn_by_row(rows: Rows[Row], result: StepResult) -> list[list[Drawn]]:
    """What each row drew."""
    places = iter(range(len(result.tokens)))
    return [
        [
            Drawn(token=result.tokens[place], logprobs=result.logprobs.get(place))
            for place in islice(places, len(row.samples))
        ]
        for row in rows
    ]


@dataclass(slots=True, eq=False)
class Text:
    """One sequence on its way, and what was drawn for it."""

    seq: Sequence
    chunk: int
    drawn: list[Drawn] = field(default_factory=list)
    scores: list[TokenLogprobs] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether all its tokens are drawn."""
        return len(self.drawn) == self.seq.params.max_tokens

    def row(self) -> Row:
        """Its share of the next step."""
        left = len(self.seq.tokens) - self.seq.num_computed
        count = min(left, self.chunk)
        start = self.seq.num_computed
        scores = self.seq.params.prompt_logprobs is not None
        return Row(
            seq=self.seq,
            start=start,
            num_tokens=count,
            samples=(self.seq.sample,) if count == left else (),
            num_scored=max(0, min(count, self.seq.prompt_len - 1 - start)) if scores else 0,
        )


def make_runner(
    decoder: Decoder,
    *,
    block_tokens: int,
    num_blocks: int,
    sink: LayerSink | None = None,
    kv_dtype: torch.dtype | None = None,
) -> tuple[ModelRunner, KvArena]:
    """A runner over a fresh arena."""
    layout = kv_layout(decoder.spec, kv_dtype or decoder.dtype, block_tokens)
    memory = memoryview(bytearray(layout.region_bytes(num_blocks)))
    arena = KvArena(layout, num_blocks, memory)
    return ModelRunner(decoder, arena, sink), arena


def make_texts(
    prompts: list[list[int]], params: SamplingParams, *, block_tokens: int, chunks: tuple[int, ...]
) -> tuple[list[Text], int]:
    """Sequences on pages in random order, chunk sizes taking turns, and how many pages that takes."""
    needed = [-(-(len(prompt) + params.max_tokens) // block_tokens) for prompt in prompts]
    pages: Iterator[int] = iter(torch.randperm(sum(needed)).tolist())
    texts = [
        Text(
            seq=sequence(
                prompt, params, seq_id=str(i), blocks=[next(pages) for _ in range(needed[i])]
            ),
            chunk=chunks[i % len(chunks)],
        )
        for i, prompt in enumerate(prompts)
    ]
    return texts, sum(needed)


def run_all(runner: ModelRunner, texts: list[Text], most_rows: int = 5) -> None:
    """Steps until every text has all its tokens; texts join as others finish, decodes and chunks mixed."""
    step = 0
    while unfinished := [text for text in texts if not text.done][:most_rows]:
        rows = tuple(text.row() for text in unfinished)
        result = runner.execute(StepPlan(step=step, rows=rows))
        step += 1
        for text, row, drawn in zip(unfinished, rows, drawn_by_row(rows, result), strict=True):
            text.seq.num_computed = row.start + row.num_tokens
            text.drawn.extend(drawn)
            text.seq.tokens.extend(one.token for one in drawn)
        for text, scores in zip(unfinished, result.scores, strict=False):
            text.scores.extend(scores)

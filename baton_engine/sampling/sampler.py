"""From a step's logits to its tokens, for all rows at once. The last thing a step computes before the host sees it.

What rows ask for goes to the device in one copy, and what was drawn comes back in one, for which alone the host waits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from baton.generation import TokenLogprobs
from baton_engine.device import is_through
from baton_engine.sampling.adjust import ScoreChanges, adjust, changes_scores, collect_changes
from baton_engine.sampling.draws import (
    DrawKernel,
    RandomRows,
    collect_random,
    draw_with_torch,
    greedy_tokens,
    likeliest,
)
from baton_engine.sampling.logprobs import logprob_table, read_logprobs
from baton_engine.sampling.masks import late_masks
from baton_engine.sampling.token_counts import CountedTexts
from baton_engine.scheduling.plan import NO_TOKEN, Row
from baton_engine.staging import DeviceStaging, StagedArray, StagedBatch

_GREEDY_BELOW = 1e-5
"""Temperatures below this are 0 (as in vLLM): dividing by them would leave the range of float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """What a step draws, on its way to the host.

    Attributes:
        tokens: `[num_draws]` int64 on the device, row after row; `NO_TOKEN` of a row whose scores are not finite.
        read: The same on the host, with the log-probabilities of those that asked for them, by place. Blocks until the
            tokens are there: a step's one synchronisation.
        late: Rows whose draws mean nothing, since it is not known yet what their grammars allow.
    """

    tokens: torch.Tensor
    read: Callable[[], tuple[list[int], dict[int, TokenLogprobs]]]
    late: frozenset[int] = frozenset()

    def known(self) -> list[int]:
        """On the host, of rows that draw one token each; `NO_TOKEN` also of those that are late."""
        tokens, _ = self.read()
        return [NO_TOKEN if row in self.late else token for row, token in enumerate(tokens)]


class Sampler:
    """Draws tokens.

    Greedy rows take the highest score, the lowest id among equals. Other rows invert the cumulative distribution of
    what their filters leave at one uniform number, which depends on (seed, sample, position) only.

    Args:
        eos_token_ids: The model's own ends, which `min_tokens` holds back.
        device: Of the logits.
        draw: Draws for the rows that have a temperature.
    """

    def __init__(
        self,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
        draw: DrawKernel = draw_with_torch,
    ) -> None:
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._staging = DeviceStaging(device)
        self._texts = CountedTexts()
        self._draw = draw

    def sample(
        self, logits: torch.Tensor, rows: Sequence[Row], greedy: torch.Tensor | None = None
    ) -> Draws:
        """Draws every sample of every row. Rows that are not finite do not touch the others. Waits only for masks, and
        hardly longer than until `logits` are computed.

        Args:
            logits: `[num_rows, vocab]` float32, of which the scores to choose from are made in place.
            rows: One per row of `logits`, each with at least one sample. Their masks were begun (`begin_masks`).
            greedy: `greedy_tokens(logits)`, where they are known already.
        """
        if all(map(_wants_the_likeliest, rows)):
            return self._copy_back(greedy_tokens(logits) if greedy is None else greedy)
        late = late_masks(rows, lambda: is_through(self._device))
        staged = StagedBatch()
        changes = collect_changes(rows, logits.shape[1], self._eos_token_ids, self._texts, staged)
        asked = _collect(rows, changes, staged)
        self._staging.send(staged)
        scores = logits
        if asked.changes:
            # Log-probabilities are those of the model itself.
            scores = logits if asked.logprobs is None else logits.clone()
            adjust(scores, asked.changes)
        tokens, is_drawn = self._tokens(scores, asked)
        marked = tokens.where(is_drawn, NO_TOKEN)
        if asked.logprobs is None:
            return replace(self._copy_back(marked), late=late)
        wanted = asked.logprobs
        table = logprob_table(logits, wanted.rows.tensor, tokens[wanted.draws.tensor], wanted.top)
        values = self._staging.copy_back(torch.cat((marked.double(), table.flat())))
        width = table.top_ids.shape[1]
        return Draws(
            tokens=marked,
            read=lambda: _with_logprobs(rows, wanted, values().tolist(), width),
            late=late,
        )

    def _copy_back(self, tokens: torch.Tensor) -> Draws:
        """Tokens without log-probabilities."""
        on_host = self._staging.copy_back(tokens)
        return Draws(tokens=tokens, read=lambda: (on_host().tolist(), {}))

    def _tokens(self, scores: torch.Tensor, asked: "_Asked") -> tuple[torch.Tensor, torch.Tensor]:
        """Of each draw, `[num_draws]`: its token, int64, and whether it means anything, bool."""
        row_of, random = asked.row_of.tensor, asked.random
        highest, best = likeliest(scores)
        tokens = best[row_of]
        if random is not None:
            drawn = self._draw(scores, highest[:, None], random).flatten()
            tokens[random.draws.tensor] = drawn[random.drawn.tensor]
        return tokens, highest[row_of].isfinite()


def _wants_the_likeliest(row: Row) -> bool:
    """And nothing else: one token, without figures, from scores as they are."""
    params = row.seq.params
    is_plain = params.temperature < _GREEDY_BELOW and params.logprobs is None
    return is_plain and len(row.samples) == 1 and not changes_scores(row)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figures:
    """Draws whose log-probabilities are wanted: which they are, staged and here, their rows,
    and how many tokens to list.
    """

    draws: StagedArray
    rows: StagedArray
    asking: tuple[tuple[int, int], ...]
    top: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What a step's rows ask of the sampler, on its way to the device; `row_of` is the row of each draw."""

    changes: ScoreChanges
    row_of: StagedArray
    random: RandomRows | None
    logprobs: _Figures | None


def _collect(rows: Sequence[Row], changes: ScoreChanges, staged: StagedBatch) -> _Asked:
    row_of = [i for i, row in enumerate(rows) for _ in row.samples]
    random = [i for i, row in enumerate(rows) if row.seq.params.temperature >= _GREEDY_BELOW]
    first_draws = np.cumsum([0, *(len(row.samples) for row in rows)]).tolist()
    return _Asked(
        changes=changes,
        row_of=staged.add(np.array(row_of, np.int64)),
        random=collect_random(rows, random, first_draws, staged) if random else None,
        logprobs=_collect_figures(rows, row_of, staged),
    )


def _collect_figures(
    rows: Sequence[Row], row_of: Sequence[int], staged: StagedBatch
) -> _Figures | None:
    asking = [(d, i) for d, i in enumerate(row_of) if rows[i].seq.params.logprobs is not None]
    if not asking:
        return None
    places = np.array(asking, np.int64)
    return _Figures(
        draws=staged.add(places[:, 0]),
        rows=staged.add(places[:, 1]),
        asking=tuple(asking),
        top=max(rows[i].seq.params.logprobs or 0 for _, i in asking),
    )


def _with_logprobs(
    rows: Sequence[Row], wanted: _Figures, values: Sequence[float], width: int
) -> tuple[list[int], dict[int, TokenLogprobs]]:
    """The step's draws from what came to the host: all tokens, then the figures of those that are wanted."""
    size = 2 + 2 * width
    num_draws = len(values) - size * len(wanted.asking)
    logprobs: dict[int, TokenLogprobs] = {}
    for place, (draw, row) in enumerate(wanted.asking):
        begin = num_draws + place * size
        top = rows[row].seq.params.logprobs or 0
        logprobs[draw] = read_logprobs(values[begin : begin + size], width, top)
    return [int(token) for token in values[:num_draws]], logprobs

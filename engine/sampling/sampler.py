"""From a step's logits to its tokens, for all rows at once. The last thing a step computes before the host sees it."""

from collections.abc import Sequence

import torch

from engine.sampling.adjust import adjust
from engine.sampling.filters import drop_unlikely
from engine.sampling.logprobs import LogprobTable, logprob_table, read_logprobs
from engine.sampling.streams import uniforms
from engine.scheduling.plan import Drawn, Row

_NONE = -1
"""Stands for a token where none can be drawn."""

_GREEDY_BELOW = 1e-5
"""Temperatures below this are 0 (as in vLLM): dividing by them would leave the range of float32."""


class Sampler:
    """Draws tokens.

    Greedy rows take the highest score, the lowest id among equals. Other rows invert the cumulative distribution of what
    their filters leave at one uniform number, which depends on (seed, sample, position) only.

    Args:
        eos_token_ids: The model's own ends, which `min_tokens` holds back.
    """

    def __init__(self, eos_token_ids: tuple[int, ...]) -> None:
        self._eos_token_ids = eos_token_ids

    def sample(self, logits: torch.Tensor, rows: Sequence[Row]) -> list[tuple[Drawn, ...]]:
        """Draws every sample of every row. Blocks until the tokens are on the host: a step's one synchronisation.

        Args:
            logits: `[num_rows, vocab]` float32, not changed.
            rows: One per row of `logits`, each with at least one sample.

        Returns:
            The draws of each row; no draw for a row whose scores are not finite, which does not touch the others.
        """
        scores = adjust(logits, rows, self._eos_token_ids)
        highest = scores.amax(-1, keepdim=True)
        row_of = [i for i, row in enumerate(rows) for _ in row.samples]
        tokens = scores.argmax(-1)
        if len(row_of) != len(rows):
            tokens = tokens[row_of]
        self._draw_random(scores, highest, rows, tokens)
        table, asking = _table(logits, rows, row_of, tokens)
        # One not-a-number makes the maximum one. Marked on the device: it comes to the host with the tokens.
        tokens.masked_fill_(~highest[row_of, 0].isfinite(), _NONE)
        if table is None:
            return _group(rows, [Drawn(token=token) for token in tokens.tolist()])
        return _group(rows, _with_logprobs(rows, row_of, tokens, table, asking))

    def _draw_random(
        self,
        scores: torch.Tensor,
        highest: torch.Tensor,
        rows: Sequence[Row],
        tokens: torch.Tensor,
    ) -> None:
        """Replaces the greedy choice of the rows that have a temperature."""
        random = [i for i, row in enumerate(rows) if row.seq.params.temperature >= _GREEDY_BELOW]
        if not random:
            return
        chosen = [rows[i] for i in random]
        cumulative = _cumulative(scores[random].sub_(highest[random]), chosen)
        width = max(len(row.samples) for row in chosen)
        targets = _targets(chosen, width).to(scores.device) * cumulative[:, -1:]
        drawn = torch.searchsorted(cumulative, targets, right=True).clamp(max=scores.shape[1] - 1)
        draws, columns, places = _places(rows, random)
        tokens[draws] = drawn[columns, places]


def _cumulative(scores: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Running mass of each row's distribution in order of token id, `[num_rows, vocab]` float64.

    Args:
        scores: `[num_rows, vocab]`, the largest of each row 0. Overwritten.
        rows: One per row.
    """
    params = [row.seq.params for row in rows]
    temperatures = torch.tensor([p.temperature for p in params], device=scores.device)
    weights = scores.div_(temperatures.unsqueeze(1)).exp_()
    drop_unlikely(weights, params)
    return weights.double().cumsum(1)


def _targets(rows: Sequence[Row], width: int) -> torch.Tensor:
    """One uniform number per sample, `[num_rows, width]` float64; shorter rows repeat their last one."""
    seeds: list[int] = []
    samples: list[int] = []
    positions: list[int] = []
    for row in rows:
        padding = (row.samples[-1],) * (width - len(row.samples))
        samples.extend(row.samples + padding)
        seeds.extend([row.seq.params.seed] * width)
        positions.extend([row.start + row.num_tokens] * width)
    return torch.from_numpy(uniforms(seeds, samples, positions)).view(len(rows), width)


def _places(rows: Sequence[Row], random: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """For each draw of the random rows: its place among all draws, its random row, its sample's column."""
    first_draw, total = [], 0
    for row in rows:
        first_draw.append(total)
        total += len(row.samples)
    entries = [
        (first_draw[i] + place, column, place)
        for column, i in enumerate(random)
        for place in range(len(rows[i].samples))
    ]
    draws, columns, places = zip(*entries, strict=True)
    return list(draws), list(columns), list(places)


def _table(
    logits: torch.Tensor, rows: Sequence[Row], row_of: Sequence[int], tokens: torch.Tensor
) -> tuple[LogprobTable | None, list[int]]:
    """The figures of the draws that want them, and which draws those are."""
    asking = [d for d, i in enumerate(row_of) if rows[i].seq.params.logprobs is not None]
    if not asking:
        return None, asking
    top = max(rows[row_of[d]].seq.params.logprobs or 0 for d in asking)
    return logprob_table(logits, [row_of[d] for d in asking], tokens[asking], top), asking


def _with_logprobs(
    rows: Sequence[Row],
    row_of: Sequence[int],
    tokens: torch.Tensor,
    table: LogprobTable,
    asking: Sequence[int],
) -> list[Drawn]:
    values = torch.cat((tokens.double(), table.flat())).tolist()
    drawn = [Drawn(token=int(token)) for token in values[: len(row_of)]]
    width = table.top_ids.shape[1]
    size = 2 + 2 * width
    for place, draw in enumerate(asking):
        begin = len(row_of) + place * size
        top = rows[row_of[draw]].seq.params.logprobs or 0
        logprobs = read_logprobs(values[begin : begin + size], width, top)
        drawn[draw] = Drawn(token=drawn[draw].token, logprobs=logprobs)
    return drawn


def _group(rows: Sequence[Row], drawn: Sequence[Drawn]) -> list[tuple[Drawn, ...]]:
    grouped, begin = [], 0
    for row in rows:
        of_row = drawn[begin : begin + len(row.samples)]
        grouped.append(() if of_row[0].token == _NONE else tuple(of_row))
        begin += len(row.samples)
    return grouped

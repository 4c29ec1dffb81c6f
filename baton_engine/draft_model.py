"""A second, smaller model in the same worker, which guesses how texts go on (`scheduling.speculation`). Its KV stands
in further layers of the same pages, so that it is shared, copied, handed off and preempted with the model's.

It draws as the model will: with the same random number for the same place of the text, the same penalties and the same
grammar. What both hold likely they then draw alike, so that as many drafts as can be are accepted.

    text      17 4 | 9             behind 4 the drafter has not computed anything yet
    pass 1         | 9        ->   30         all that is new of the text
    pass 2                30  ->   8          a draft, each behind the one before
    pass 3                8   ->   2          3 drafts: 30 8 2; its KV of the first two is in the pages
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from baton.errors import EngineError
from baton_engine.cache.arena import DrafterPages, KvArena
from baton_engine.cuda_graphs import StepGraphs
from baton_engine.device import computing_on
from baton_engine.models.decoder import Decoder, HiddenObserver, LayerHooks
from baton_engine.models.inputs import InputBuilder
from baton_engine.models.prepare import prepare_decoder
from baton_engine.sampling.draws import choose_draw
from baton_engine.sampling.masks import begin_masks
from baton_engine.sampling.sampler import Draws, Sampler
from baton_engine.scheduling.plan import NO_TOKEN, DraftPlan, DraftRow, Row
from baton_engine.scheduling.request import State


class DraftModel:
    """A `Drafter`, and what computes its KV of prompts.

    Args:
        model: Weights and layers, on the device of `arena`.
        arena: The pages that both models' KV stands in.
        pages: Those of the drafter.
        eos_token_ids: Of the model whose texts these are.
        graphs: Of the same model and pages; None where there are none.
        one_by_one: See `InputBuilder`.
    """

    def __init__(
        self,
        model: Decoder,
        arena: KvArena,
        pages: DrafterPages,
        *,
        eos_token_ids: tuple[int, ...],
        graphs: StepGraphs | None = None,
        one_by_one: bool = False,
    ) -> None:
        self.observer: HiddenObserver | None = None
        self._model = model
        self._pages = pages
        self._graphs = graphs
        self._first_layer = len(arena.layout.layers) - -(-len(model.layers) // pages.stride)
        self._inputs = InputBuilder(
            arena.layout.block_tokens,
            arena.num_blocks,
            model.device,
            prepare_decoder(model, pages),
            page_stride=pages.stride,
            one_by_one=one_by_one,
        )
        self._sampler = Sampler(eos_token_ids, model.device, choose_draw(model.device))

    def compute_prompts(self, rows: Sequence[Row], hooks: LayerHooks | None) -> None:
        """See PromptDrafter."""
        prompts = [
            replace(row, samples=(), num_scored=0)
            for row in rows
            if row.seq.state is State.PREFILLING
        ]
        if prompts:
            between = None if hooks is None else self._hooks(hooks)
            self._model.hidden(self._inputs.build(prompts), self._pages, between)

    def _hooks(self, hooks: LayerHooks) -> "_ArenaHooks":
        return _ArenaHooks(hooks, self._first_layer, len(self._model.layers), self._pages.stride)

    @torch.inference_mode()
    def draft(self, plan: DraftPlan) -> list[list[int]]:
        """See Drafter."""
        with computing_on(self._model.device):
            return draw_drafts(plan, self._draw)

    def _draw(self, rows: list[Row]) -> list[int]:
        """One token behind each of the rows that draw."""
        begin_masks(rows)
        drawing = [row for row in rows if row.samples]
        draws: Draws | None = None
        if self._graphs is not None and self._graphs.takes_rows(rows):
            scored = self._graphs.scores(rows)
            draws = self._sampler.sample(scored.logits, drawing, scored.greedy)
        else:
            hidden = self._model.hidden(self._inputs.build(rows), self._pages)
            if drawing:
                draws = self._sampler.sample(self._model.head(hidden), drawing)
        return [] if draws is None else draws.known()


def draw_drafts(plan: DraftPlan, draw: Callable[[list[Row]], list[int]]) -> list[list[int]]:
    """What a `Drafter` draws for `plan`, pass by pass.

    Args:
        plan: What is wanted.
        draw: Computes rows, and draws one token behind each of them that has samples.
    """
    drawn: list[list[int]] = [[] for _ in plan.rows]
    # Decodes stand first in a step.
    places = sorted(range(len(plan.rows)), key=lambda place: plan.rows[place].num_tokens)
    rows = [_first_row(plan.rows[place]) for place in places]
    try:
        while rows:
            going_on: list[tuple[int, Row]] = []
            drawing = [(p, row) for p, row in zip(places, rows, strict=True) if row.samples]
            for (place, row), token in zip(drawing, draw(rows), strict=True):
                if token == NO_TOKEN:
                    continue
                drawn[place].append(token)
                is_end = token in row.seq.request.stop_ids
                if not is_end and len(drawn[place]) < plan.rows[place].count:
                    going_on.append((place, _next_row(row, token)))
            places, rows = [p for p, _ in going_on], [r for _, r in going_on]
    except (RuntimeError, IndexError, ValueError) as error:
        raise EngineError(f"no drafts could be computed: {error}") from error
    return drawn


def _first_row(asked: DraftRow) -> Row:
    seq = asked.seq
    samples = seq.samples if asked.count else ()
    return Row(seq=seq, start=asked.start, num_tokens=asked.num_tokens, samples=samples)


def _next_row(row: Row, token: int) -> Row:
    """The row that computes `token`, which was drawn behind `row`."""
    constraint = row.constraint
    return Row(
        seq=row.seq,
        start=row.start + row.num_tokens,
        num_tokens=1,
        samples=row.samples,
        draft=(*row.draft, token),
        constraint_after=None if constraint is None else constraint.fork_for_draft(token),
    )


class _ArenaHooks:
    """Hooks around the layers of a drafter, of which the arena has several in one layer."""

    def __init__(self, hooks: LayerHooks, first_layer: int, num_layers: int, stride: int) -> None:
        self._hooks = hooks
        self._first_layer = first_layer
        self._num_layers = num_layers
        self._stride = stride

    def before(self, layer_index: int) -> None:
        if layer_index % self._stride == 0:
            self._hooks.before(self._first_layer + layer_index // self._stride)

    def after(self, layer_index: int) -> None:
        end = layer_index + 1
        if end % self._stride == 0 or end == self._num_layers:
            self._hooks.after(self._first_layer + layer_index // self._stride)

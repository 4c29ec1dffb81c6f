"""Computes the steps that the scheduler plans: copies, layers, sampling. One per rank, on the engine loop's thread."""

from collections.abc import Callable

import torch

from baton.errors import EngineError
from baton.generation import TokenLogprobs
from engine.cache.arena import KvArena
from engine.models.decoder import Decoder
from engine.models.inputs import InputBuilder
from engine.ports import LayerSink
from engine.sampling.prompt_scores import PromptScorer
from engine.sampling.sampler import Sampler
from engine.scheduling.plan import Drawn, Row, StepPlan, StepResult


class ModelRunner:
    """A `StepRunner` over one model and its arena.

    Args:
        model: Weights and layers, on one device.
        arena: Pages on the same device.
        sink: Told after each layer which pages may leave; None where nothing is handed over.
    """

    def __init__(self, model: Decoder, arena: KvArena, sink: LayerSink | None = None) -> None:
        self._model = model
        self._arena = arena
        self._sink = sink
        self._inputs = InputBuilder(arena.layout.block_tokens, arena.num_blocks, model.device)
        self._sampler = Sampler(model.spec.eos_token_ids)
        self._scorer = PromptScorer(model.head, model.spec.vocab_size)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step; blocks until its tokens are on the host.

        Raises:
            EngineError: The step cannot be computed, be it for one row. Nothing but the pages of the plan's rows was written.
        """
        try:
            return self._execute(plan)
        except (RuntimeError, IndexError, ValueError) as error:
            raise EngineError(f"step {plan.step} failed: {error}") from error

    def _execute(self, plan: StepPlan) -> StepResult:
        self._arena.copy_pages(plan.copies)
        if not plan.rows:
            return StepResult(drawn=())
        step = self._inputs.build(plan.rows)
        hidden = self._model.hidden(step, self._arena, self._layer_done(plan))
        sampling = [row for row in plan.rows if row.samples]
        drawn = iter(self._draw(hidden[: len(sampling)], sampling) if sampling else ())
        scores = self._scorer.score(hidden[len(sampling) :], plan.rows)
        return _result(plan, tuple(next(drawn) if row.samples else () for row in plan.rows), scores)

    def _draw(self, hidden: torch.Tensor, rows: list[Row]) -> list[tuple[Drawn, ...]]:
        """Apart from what is scored, so that nobody's tokens depend on whether somebody scores."""
        return self._sampler.sample(self._model.head(hidden), rows)

    def _layer_done(self, plan: StepPlan) -> Callable[[int], None] | None:
        sink = self._sink
        if sink is None or not plan.exports:
            return None
        return lambda layer_index: sink.layer_ready(layer_index, plan.exports)


def _result(
    plan: StepPlan,
    drawn: tuple[tuple[Drawn, ...], ...],
    scores: tuple[tuple[TokenLogprobs, ...], ...],
) -> StepResult:
    """Of rows that should have drawn, those that did not have failed."""
    failed = [
        (place, EngineError("the model's scores are not finite, no token can be drawn from them"))
        for place, row in enumerate(plan.rows)
        if row.samples and not drawn[place]
    ]
    return StepResult(drawn=drawn, scores=scores, failed=tuple(failed))

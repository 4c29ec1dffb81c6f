"""Computes the steps that the scheduler plans: copies, layers, sampling. One per rank, on the engine loop's thread."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Protocol

import torch

from baton.errors import BatonError, DeviceLostError, EngineError
from baton.generation import TokenLogprobs
from baton.pages import FetchOutcome
from baton_engine.cache.arena import KvArena
from baton_engine.cuda_graphs import StepGraphs
from baton_engine.device import computing_on, layer_marker, wait_for
from baton_engine.layer_hooks import KvLayerHooks
from baton_engine.models.decoder import Decoder, HiddenObserver, LayerHooks
from baton_engine.models.inputs import InputBuilder, Unseen
from baton_engine.models.prepare import prepare_decoder
from baton_engine.ports import KvSource, LayerSink
from baton_engine.sampling.draws import choose_draw
from baton_engine.sampling.logprobs import PromptScorer
from baton_engine.sampling.masks import begin_masks
from baton_engine.sampling.sampler import Draws, Sampler
from baton_engine.scheduling.plan import (
    NO_TOKEN,
    Launched,
    Row,
    StepPlan,
    StepResult,
    still_compiling,
)

_OF_ONE_CALL = frozenset({1, 2, 9})
"""CUDA's errors after which a GPU goes on: invalid value, want of memory (of the host too), invalid configuration."""
_NOT_FINITE = "the model's scores are not finite, no token can be drawn from them"


class PromptDrafter(Protocol):
    """A drafter (`Drafter`), as far as it computes with the model's steps."""

    @property
    def observer(self) -> HiddenObserver | None:
        """Reads the model's hidden states in each step; None where it needs none."""

    def compute_prompts(self, rows: Sequence[Row], hooks: LayerHooks | None) -> None:
        """Computes its KV of prompts, of the same tokens as the model in the same step.

        Args:
            rows: Of the step; those that decode are left out.
            hooks: Called around the layers of the arena.
        """


class ModelRunner:
    """A `StepRunner` over one model and its arena.

    Args:
        model: Weights and layers, on one device.
        arena: Pages on the same device.
        sink: Told after each layer which pages may leave; None where nothing is handed off.
        graphs: Of the same model and arena, for the steps that they take; None where there are none.
        drafter: Computes its KV of prompts in the same steps; None where there is none.
        one_by_one: See `InputBuilder`.

    Raises:
        EngineError: The model cannot compute with the pages of the arena.
    """

    def __init__(
        self,
        model: Decoder,
        arena: KvArena,
        sink: LayerSink | None = None,
        graphs: StepGraphs | None = None,
        *,
        drafter: PromptDrafter | None = None,
        one_by_one: bool = False,
    ) -> None:
        self._model = model
        self._arena = arena
        self._sink = sink
        self._graphs = graphs
        self._drafter = drafter
        self._mark = layer_marker(model.device)
        self._source: KvSource | None = None
        self._inputs = InputBuilder(
            arena.layout.block_tokens,
            arena.num_blocks,
            model.device,
            prepare_decoder(model, arena),
            one_by_one=one_by_one,
        )
        self._sampler = Sampler(model.spec.eos_token_ids, model.device, choose_draw(model.device))
        self._scorer = PromptScorer(model.head, model.spec.vocab_size, model.device)
        self._last: _UnderWay | None = None

    def fetch_from(self, source: KvSource) -> None:
        """Plans may have fetches from now on, and `source` brings them."""
        self._source = source

    def execute(self, plan: StepPlan) -> StepResult:
        """See StepRunner."""
        return self.launch(plan)()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """See StepRunner. On a CPU all but draws that wait for tokens is computed before this returns."""
        with _named(plan), computing_on(self._model.device):
            waits_for_tokens = _waits_for_tokens(plan)
            if not waits_for_tokens:
                begin_masks(plan.rows)
            before, self._last = self._last, None  # a step that breaks off leaves none
            step = self._launch(plan, self._unseen(plan, before))
            if still_compiling(plan.rows):
                # Until the scores are there the grammar has time: nothing waits for it longer than for them.
                wait_for(self._model.device)
            if not waits_for_tokens:
                step.draws  # noqa: B018 - drawn at once
        self._last = step
        return partial(self._collect, step)

    def _unseen(self, plan: StepPlan, before: "_UnderWay | None") -> Unseen | None:
        if not plan.follows or before is None or before.draws is None:
            return None
        return Unseen(tokens=before.draws.tokens, places=plan.follows)

    def _launch(self, plan: StepPlan, unseen: Unseen | None) -> "_UnderWay":
        self._arena.copy_pages(plan.copies)
        if not plan.rows:
            return _UnderWay(plan)
        sampling = [row for row in plan.rows if row.samples]
        if self._graphs is not None and self._graphs.takes(plan):
            scored = self._graphs.scores(plan.rows, unseen)
            draw = partial(self._sampler.sample, scored.logits, sampling, scored.greedy)
            if self._drafter is not None:
                # To a graph the last token of a prompt is a decode like any other.
                self._drafter.compute_prompts(plan.rows, None)
            return _UnderWay(plan, draw if sampling else None)
        hidden, fetched = self._compute(plan, unseen)
        sample = self._sampling(hidden[: len(sampling)], sampling) if sampling else None
        scores = self._scorer.score(hidden[len(sampling) :], plan.rows)
        return _UnderWay(plan, sample, scores, fetched)

    @torch.inference_mode()
    def _collect(self, step: "_UnderWay") -> StepResult:
        with _named(step.plan), computing_on(self._model.device):
            if step.draws is not None:
                return step.result(*step.draws.read())
            wait_for(self._model.device)
            return step.result([], {})

    def _compute(
        self, plan: StepPlan, unseen: Unseen | None
    ) -> tuple[torch.Tensor, FetchOutcome | None]:
        step = self._inputs.build(plan.rows, unseen=unseen)
        hooks = KvLayerHooks(plan, self._source, self._sink, self._mark)
        with hooks:
            observer = None if self._drafter is None else self._drafter.observer
            hidden = self._model.hidden(step, self._arena, hooks.between_layers, observer)
            if self._drafter is not None:
                self._drafter.compute_prompts(plan.rows, hooks.between_layers)
        return hidden, hooks.outcome

    def _sampling(self, hidden: torch.Tensor, rows: list[Row]) -> Callable[[], Draws]:
        """Apart from what is scored, so that no token depends on whether a prompt is scored beside it."""
        return partial(self._sampler.sample, self._model.head(hidden), rows)


@contextmanager
def _named(plan: StepPlan) -> Iterator[None]:
    """Faults of torch and of what it was given, as those of the step; those after which a GPU computes nothing more,
    as its loss.

    What a kernel did wrong is told by whatever call comes next. So a step that breaks off waits for the GPU
    (`computing_on`), and is told the same again where the GPU is lost.
    """
    try:
        yield
    except (RuntimeError, IndexError, ValueError) as error:
        if _is_its_loss(error):
            raise DeviceLostError(f"the GPU failed in step {plan.step}: {error}") from error
        raise EngineError(f"step {plan.step} failed: {error}") from error


def _is_its_loss(error: Exception) -> bool:
    is_of_gpu = isinstance(error, torch.AcceleratorError)
    return is_of_gpu and getattr(error, "error_code", None) not in _OF_ONE_CALL


def _waits_for_tokens(plan: StepPlan) -> bool:
    """Whether what a step draws depends on the tokens of the step before it, which the host has not seen yet."""
    return bool(plan.follows) and any(row.seq.counts_tokens for row in plan.rows)


class _UnderWay:
    """A step whose scores are computed.

    Args:
        plan: The step.
        sample: Draws its tokens from them; None where it draws none.
        scores: Of prompt tokens; see `StepResult.scores`.
        fetched: How its fetches went.

    Attributes:
        undrawn: Rows whose grammars are still compiled, or whose masks are late, known with `draws`.
    """

    def __init__(
        self,
        plan: StepPlan,
        sample: Callable[[], Draws] | None = None,
        scores: tuple[tuple[TokenLogprobs, ...], ...] = (),
        fetched: FetchOutcome | None = None,
    ) -> None:
        self.plan = plan
        self._sample = sample
        self._scores = scores
        self._fetched = fetched
        self.undrawn: tuple[int, ...] = ()

    @cached_property
    def draws(self) -> Draws | None:
        """What it draws, drawn when this is first read."""
        if self._sample is None:
            return None
        rows = self.plan.rows
        begin_masks(
            rows
        )  # nothing but those of a step that was launched before its tokens were known
        compiling = still_compiling(rows)
        draws = self._sample()
        self._sample = None  # it holds the scores
        self.undrawn = compiling
        if draws.late:
            drawing = [place for place, row in enumerate(rows) if row.samples]
            self.undrawn += tuple(drawing[place] for place in draws.late)
        return draws

    def result(self, tokens: list[int], logprobs: Mapping[int, TokenLogprobs]) -> StepResult:
        """Rows whose pages were not brought have failed, those whose grammar did, and of those that should have drawn,
        those that did not.
        """
        plan, fetched, undrawn = self.plan, self._fetched, self.undrawn
        lost = fetched.failed if fetched is not None else {}
        failed: list[tuple[int, BatonError]] = []
        if lost or undrawn or NO_TOKEN in tokens or any(row.fault for row in plan.rows):
            begin = 0
            for place, row in enumerate(plan.rows):
                end = begin + len(row.samples)
                if (error := lost.get(row.seq.seq_id) or row.fault) is not None:
                    failed.append((place, error))
                    tokens[begin:end] = [NO_TOKEN] * len(row.samples)
                elif place in undrawn:
                    tokens[begin:end] = [NO_TOKEN] * len(row.samples)
                elif NO_TOKEN in tokens[begin:end]:
                    failed.append((place, EngineError(_NOT_FINITE)))
                begin = end
        return StepResult(
            tokens=tokens,
            logprobs=logprobs,
            scores=self._scores,
            failed=tuple(failed),
            fetched=fetched,
            undrawn=undrawn,
        )

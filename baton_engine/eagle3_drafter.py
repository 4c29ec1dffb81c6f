"""Guesses how texts go on by an EAGLE-3 head (`models.eagle3`). What the head reads of the model stands in the pages
beside its KV, for every token that the model computes: so a text that goes on elsewhere, later, or from a prefix that
was found, is guessed as if it had never moved.

Its KV of a token stands in the place before the token's own. What it computes from its own states, for drafts, is
computed again from the model's once that has come so far.
"""

from collections.abc import Sequence
from itertools import count

import torch

from baton_engine.cache.arena import DrafterPages, HiddenPages, KvArena
from baton_engine.device import computing_on
from baton_engine.draft_model import draw_drafts
from baton_engine.models.decoder import DecoderInput, HiddenObserver, LayerHooks
from baton_engine.models.eagle3 import Eagle3Head, FusedHidden
from baton_engine.models.inputs import InputBuilder
from baton_engine.models.prepare import prepare_eagle3
from baton_engine.sampling.draws import choose_draw
from baton_engine.sampling.masks import begin_masks
from baton_engine.sampling.sampler import Sampler
from baton_engine.scheduling.plan import DraftPlan, Row
from baton_engine.scheduling.request import State

SHIFT = 1


class Eagle3Drafter:
    """A `Drafter`, and what computes its KV of prompts.

    Args:
        head: On the device of `arena`.
        arena: The pages that the model's KV stands in, the head's and what it reads.
        num_model_layers: Of the arena, in front.
        eos_token_ids: Of the model whose texts these are.
        one_by_one: See `InputBuilder`.

    Attributes:
        observer: Keeps what the head reads.
    """

    def __init__(
        self,
        head: Eagle3Head,
        arena: KvArena,
        *,
        num_model_layers: int,
        eos_token_ids: tuple[int, ...],
        one_by_one: bool = False,
    ) -> None:
        layer = head.spec.layer
        self._head = head
        self._pages = DrafterPages(
            arena,
            first_layer=num_model_layers,
            num_layers=1,
            kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
        )
        self._hidden = HiddenPages(arena, first_layer=num_model_layers + 1, width=layer.hidden_size)
        self.observer: HiddenObserver = FusedHidden(head, self._hidden)
        self._own_layers = range(num_model_layers, len(arena.layout.layers))
        self._block_tokens = arena.layout.block_tokens
        self._inputs = InputBuilder(
            arena.layout.block_tokens,
            arena.num_blocks,
            head.device,
            prepare_eagle3(head, self._pages),
            page_stride=self._pages.stride,
            shift=SHIFT,
            one_by_one=one_by_one,
        )
        self._sampler = Sampler(eos_token_ids, head.device, choose_draw(head.device))
        self._last = torch.empty(0)
        self._place_of: dict[int, int] = {}

    def compute_prompts(self, rows: Sequence[Row], hooks: LayerHooks | None) -> None:
        """See PromptDrafter. Of the last token of a prompt the head reads nothing yet:
        what follows it is being drawn.
        """
        prompts = [
            Row(seq=row.seq, start=known.start, num_tokens=len(known), samples=())
            for row in rows
            if row.seq.state is State.PREFILLING and (known := _known(row))
        ]
        if hooks is not None:
            for layer_index in self._own_layers:
                hooks.before(layer_index)
        if prompts:
            step = self._inputs.build(prompts)
            self._head.compute(step, self._read(step), self._pages)
        if hooks is not None:
            for layer_index in self._own_layers:
                hooks.after(layer_index)

    @torch.inference_mode()
    def draft(self, plan: DraftPlan) -> list[list[int]]:
        """See Drafter."""
        with computing_on(self._head.device):
            return draw_drafts(plan, self._draw)

    def _draw(self, rows: list[Row]) -> list[int]:
        """One token behind each of the rows that draw: in the first pass from what the model held,
        then from what the head gave itself.
        """
        begin_masks(rows)
        step = self._inputs.build(rows)
        if any(row.draft for row in rows):
            places = [self._place_of[id(row.seq)] for row in rows]
            hidden = self._last[torch.tensor(places, device=self._head.device)]
        else:
            hidden = self._read(step)
        out, self._last = self._head.compute(step, hidden, self._pages)
        drawing = [row for row in rows if row.samples]
        self._place_of = dict(zip((id(row.seq) for row in drawing), count(), strict=False))
        if not drawing:
            return []
        return self._sampler.sample(self._head.logits(out), drawing).known()

    def _read(self, step: DecoderInput) -> torch.Tensor:
        """What the model held at the places of a step, `[num_tokens, hidden]`."""
        slots, size = step.batch.slots, self._block_tokens
        # The head counts `stride` pages to one of the arena.
        pages = slots.div(size * self._pages.stride, rounding_mode="floor")
        return self._hidden.read(pages * size + slots.remainder(size)).to(self._head.dtype)


def _known(row: Row) -> range:
    """The tokens that the head can compute once the model has computed a row of a prompt."""
    seq = row.seq
    end = min(row.start + row.num_tokens + SHIFT, len(seq.tokens))
    return range(max(seq.num_drafted, SHIFT), end)

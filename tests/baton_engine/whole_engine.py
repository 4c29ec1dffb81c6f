"""A scheduler over a real model, stepped by hand: for tests of what a model's bits depend on."""

from concurrent.futures import Future
from pathlib import Path

import torch

from baton.config.speculative import DraftModelSpeculation, Eagle3Speculation, Speculation
from baton.errors import BatonError
from baton.generation import TokenLogprobs, TokenSample
from baton.ids import SeqId
from baton_engine.cache.arena import DrafterPages, KvArena
from baton_engine.draft_model import DraftModel
from baton_engine.eagle3_drafter import Eagle3Drafter
from baton_engine.kernels.ports import BatchInvariant, KernelSet
from baton_engine.messages import AddRequest, Command, PrefillStarted, Reserved, Start
from baton_engine.models.config import ModelSpec, kv_layout, load_spec
from baton_engine.models.decoder import Decoder
from baton_engine.models.draft_spec import load_draft_spec, load_head_spec
from baton_engine.models.loader import load_decoder, load_eagle3
from baton_engine.ports import GrammarCompiler, TokenConstraint
from baton_engine.runner import ModelRunner
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.scheduling.scheduler import Scheduler
from tests.baton_engine.sampled import Event, Sampled, by_sequence

BLOCK_TOKENS = 16
CPU = torch.device("cpu")


class WholeEngine:
    """Everything below the loop.

    Args:
        checkpoint: The model.
        deterministic: As `engine.deterministic`.
        budget: Tokens of a step.
        num_blocks: Pages.
        dtype: To compute in.
        quantization: Of the weights.
        kernels: What to compute with; None for the machine's own.
        eos_ids: Tokens that end a text.
        grammars: Compiles the grammars of prompts, where there are any.
        speculation: How tokens are guessed; None where none are. A draft model is the one in that directory.

    Attributes:
        events: All that was told.
        limits: What the scheduler keeps to.
        arena: The pages.
        scheduler: Plans the steps.
        runner: Computes them.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        deterministic: bool = True,
        budget: int = 256,
        num_blocks: int = 64,
        dtype: torch.dtype = torch.float32,
        quantization: str = "none",
        kernels: KernelSet | None = None,
        eos_ids: tuple[int, ...] = (),
        grammars: GrammarCompiler | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        spec = load_spec(checkpoint)
        decoder = load_decoder(
            checkpoint,
            spec,
            dtype,
            CPU,
            kernels=kernels,
            quantization=quantization,
            fixed_rows=deterministic,
        )
        drafter = head = None
        layout = kv_layout(spec, dtype, BLOCK_TOKENS)
        if isinstance(speculation, DraftModelSpeculation):
            drafter = load_draft_spec(speculation, spec, checkpoint)
            layout = kv_layout(spec, dtype, BLOCK_TOKENS, drafter[1])
        elif isinstance(speculation, Eagle3Speculation):
            head = load_head_spec(speculation, spec)
            layer = head[1].layer
            reads = layer.hidden_size
            layout = kv_layout(spec, dtype, BLOCK_TOKENS, layer, drafter_reads=reads)
        self.limits = EngineLimits(
            max_num_seqs=8,
            max_num_batched_tokens=budget,
            max_model_len=512,
            block_tokens=BLOCK_TOKENS,
            num_blocks=num_blocks,
            vocab_size=spec.vocab_size,
        )
        memory = memoryview(bytearray(layout.region_bytes(num_blocks)))
        self.arena = KvArena(layout, num_blocks, memory)
        self.scheduler = Scheduler(
            self.limits, layout=layout, secret=bytes(32), eos_ids=eos_ids, speculation=speculation
        )
        self._grammars = grammars
        apart = deterministic and not isinstance(kernels, BatchInvariant)
        self.drafter: DraftModel | Eagle3Drafter | None = None
        if drafter is not None:
            self.drafter = self._load_drafter(decoder, *drafter, apart)
        elif head is not None:
            self.drafter = Eagle3Drafter(
                load_eagle3(*head, decoder, fixed_rows=deterministic),
                self.arena,
                num_model_layers=spec.num_layers,
                eos_token_ids=spec.eos_token_ids,
                one_by_one=apart,
            )
        self.runner = ModelRunner(decoder, self.arena, drafter=self.drafter, one_by_one=apart)
        self.events: list[Event] = []

    def _load_drafter(
        self, target: Decoder, path: Path, spec: ModelSpec, one_by_one: bool
    ) -> DraftModel:
        pages = DrafterPages(
            self.arena,
            first_layer=target.spec.num_layers,
            num_layers=spec.num_layers,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
        )
        return DraftModel(
            load_decoder(path, spec, target.dtype, CPU, kernels=target.kernels, fixed_rows=True),
            self.arena,
            pages,
            eos_token_ids=target.spec.eos_token_ids,
            one_by_one=one_by_one,
        )

    def tell(self, *commands: Command) -> None:
        for command in commands:
            self.events += self.scheduler.handle(command, 0.0, self._constraint(command))

    def _constraint(self, command: Command) -> TokenConstraint | None:
        if not isinstance(command, AddRequest) or not command.prompt.sampling.grammar:
            return None
        assert self._grammars is not None
        compiled: Future[TokenConstraint | BatonError] = Future()
        self._grammars.compile(command.prompt, compiled.set_result)
        constraint = compiled.result(timeout=20)
        assert not isinstance(constraint, BatonError), constraint
        return constraint

    def step(self) -> bool:
        asked = self.scheduler.plan_drafts(0.0)
        if asked is not None:
            assert self.drafter is not None
            self.scheduler.drafted(asked, self.drafter.draft(asked), 0.0)
        plan, events = self.scheduler.schedule(0.0)
        self.events += events
        if plan is None:
            return False
        result = self.runner.execute(plan)
        assert not result.failed
        self.events += by_sequence(self.scheduler.update_from_output(plan, result, 0.0))
        self.scheduler.check_integrity()
        return True

    def run(self) -> None:
        for _ in range(3000):
            if not self.step():
                return
        raise AssertionError("still running")

    def tokens(self, seq_id: SeqId) -> tuple[TokenSample, ...]:
        """What was drawn, with the exact log-probabilities where they were asked for."""
        told = [e for e in self.events if isinstance(e, Sampled) and e.seq_id == seq_id]
        return tuple(token for event in told for token in event.tokens)

    def scores(self, seq_id: SeqId) -> tuple[TokenLogprobs, ...]:
        """The prompt's own log-probabilities."""
        told = [e for e in self.events if isinstance(e, Sampled) and e.seq_id == seq_id]
        return next(event.prompt_logprobs for event in told if event.prompt_logprobs is not None)

    def cached_tokens(self, seq_id: SeqId) -> list[int]:
        started = [e for e in self.events if isinstance(e, PrefillStarted)]
        return [event.cached_tokens for event in started if event.seq_id == seq_id]


def hand_off(source: WholeEngine, target: WholeEngine, seq_id: SeqId, blocks: list[int]) -> None:
    """Copies the source's pages `blocks` bit by bit into those that the target reserved, and starts there."""
    (reserved,) = [e for e in target.events if isinstance(e, Reserved) and e.seq_id == seq_id]
    for index in range(len(target.arena.layout.layers)):
        ours, theirs = source.arena.layer(index), target.arena.layer(index)
        for place, (block, into) in enumerate(zip(blocks, reserved.blocks, strict=True)):
            if place >= reserved.held_blocks:
                theirs[into] = ours[block]
    target.tell(Start(seq_id=seq_id, first_tokens=source.tokens(seq_id)))

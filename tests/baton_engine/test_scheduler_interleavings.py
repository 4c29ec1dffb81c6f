"""Any order of commands and steps: tokens are those of an undisturbed run, every sequence ends once,
no page is lost.
"""

from collections.abc import Sequence

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from baton.config.speculative import NgramSpeculation
from baton.errors import InvalidRequestError
from baton.generation import BeamSearchParams, EarlyStopping, Prompt, SloTargets
from baton.ids import SeqId
from baton_engine.messages import (
    Abort,
    Command,
    Failed,
    FlushCache,
    Generate,
    Prefill,
    PromptComputed,
    Receive,
    Release,
    Released,
    Reserved,
)
from baton_engine.ports import CompilingGrammar
from baton_engine.scheduling.ordering import PREEMPTION_ORDERS, PREFILL_ORDERINGS, SchedulingPolicy
from tests.baton_engine.sampled import Sampled
from tests.baton_engine.scheduling_world import World, hand_off, limits, prompt

EOS = (3,)

TEXTS = st.text("ab", min_size=1, max_size=14).map(lambda text: tuple(map(ord, text)))

SLOS = st.builds(
    SloTargets,
    ttft_s=st.none() | st.sampled_from([0.0, 1.0]),
    tbt_s=st.none() | st.sampled_from([0.01, 1.0]),
    priority=st.integers(0, 2),
)

DRAWN = st.builds(
    prompt, TEXTS, samples=st.integers(1, 3), max_tokens=st.sampled_from([1, 5, 12]), slo=SLOS
)

SEARCHED = st.builds(
    prompt,
    TEXTS,
    samples=st.integers(1, 2),
    max_tokens=st.sampled_from([1, 5]),
    slo=SLOS,
    beam_search=st.builds(
        BeamSearchParams,
        length_penalty=st.sampled_from([0.0, 1.0, 2.0]),
        early_stopping=st.sampled_from(EarlyStopping),
    ),
)
"""As large as any arena here has room for alone: all beams of a prompt have to fit."""

ASKED = DRAWN | SEARCHED

POLICIES = st.builds(
    SchedulingPolicy,
    tbt_s=st.none() | st.just(0.05),
    prefill_order=st.sampled_from(sorted(PREFILL_ORDERINGS)),
    preemption=st.sampled_from(sorted(PREEMPTION_ORDERS)),
    output_headroom=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
)


SPECULATION = st.builds(
    NgramSpeculation,
    num_speculative_tokens=st.integers(1, 6),
    prompt_lookup_max=st.integers(1, 3),
    prompt_lookup_min=st.just(1),
)


class Reading:
    """A constraint that allows everything, and has to be told all that is drawn.

    Args:
        world: Where it is drawn.
        asked: Whose output it is.
        read: Tokens, so far.
    """

    fault = None

    def __init__(self, world: World, asked: Prompt, read: tuple[int, ...] = ()) -> None:
        self._world, self._asked, self._read = world, asked, list(read)
        self._looks_left: int | None = 0  # the first mask comes with the grammar

    def accept(self, token: int) -> None:
        assert not self.finding()
        self._read.append(token)
        self._looks_left = None
        texts = [self._world.undisturbed(self._asked, sample) for sample in self._asked.samples]
        assert any(text[: len(self._read)] == self._read for text in texts)
        if sum(self._read) % 8 == 1:
            self.begin(late=True)  # known to take long: the next step goes without

    def fork(self) -> "Reading":
        assert not self.finding()
        return Reading(self._world, self._asked, tuple(self._read))

    def fork_for_draft(self, token: int) -> "Reading":
        forked = self.fork()
        forked._looks_left = None
        return forked

    def begin(self, *, late: bool = False) -> None:
        if (
            self._looks_left is None
        ):  # some masks are only there when they were looked for three times
            self._looks_left = 3 if sum(self._read) % 4 == 1 else 0

    def finding(self, within_s: float = 0.0) -> bool:
        if not self._looks_left:
            return False
        self._looks_left -= 1
        return True

    def num_allowed(self, tokens: Sequence[int]) -> int:
        return len(tokens)

    def fill(self, bits: NDArray[np.uint32]) -> None:
        raise AssertionError("nothing is scored here")


class Interleavings(RuleBasedStateMachine):
    """Two hybrid engines. Prompts run on the target, or are prefilled on the source and handed off to the target."""

    @initialize(
        block_tokens=st.sampled_from([1, 2, 4]),
        pages_tokens=st.integers(26, 44),
        max_num_seqs=st.integers(3, 6),
        max_num_batched_tokens=st.integers(3, 16),
        caching=st.booleans(),
        policy=POLICIES,
        speculation=st.none() | SPECULATION,
    )
    def begin(
        self,
        block_tokens,
        pages_tokens,
        max_num_seqs,
        max_num_batched_tokens,
        caching,
        policy,
        speculation,
    ):
        some = limits(
            block_tokens=block_tokens,
            num_blocks=-(-pages_tokens // block_tokens),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            vocab_size=128,
        )
        self.source, self.target = (
            World(
                some,
                eos_ids=EOS,
                enable_prefix_caching=caching,
                policy=policy,
                speculation=speculation,
                patience=4,
            )
            for _ in range(2)
        )
        self.local: dict[SeqId, Prompt] = {}
        self.moving: dict[SeqId, Prompt] = {}
        self.unasked: set[SeqId] = set()
        self.started: set[SeqId] = set()
        self.cut: set[SeqId] = set()
        self.compiling: dict[SeqId, tuple[World, Prompt, CompilingGrammar]] = {}

    def _new_id(self) -> SeqId:
        return SeqId(f"s{len(self.local) + len(self.moving)}")

    @rule(asked=ASKED)
    def generate(self, asked: Prompt):
        seq_id = self._new_id()
        self.local[seq_id] = asked
        self.target.tell(Generate(seq_id=seq_id, prompt=asked))

    @rule(asked=DRAWN)
    def generate_while_a_grammar_is_compiled(self, asked: Prompt):
        seq_id, grammar = self._new_id(), CompilingGrammar()
        self.local[seq_id] = asked
        self.compiling[seq_id] = self.target, asked, grammar
        self.target.tell_compiling(Generate(seq_id=seq_id, prompt=asked), grammar)

    @rule(asked=DRAWN)
    def prefill_while_a_grammar_is_compiled(self, asked: Prompt):
        seq_id, grammar = self._new_id(), CompilingGrammar()
        self.moving[seq_id] = asked
        self.unasked.add(seq_id)
        self.compiling[seq_id] = self.source, asked, grammar
        self.source.tell_compiling(Prefill(seq_id=seq_id, prompt=asked), grammar)

    @rule(data=st.data(), is_told=st.booleans())
    def compile(self, data, is_told: bool):
        """Where it is not told yet, a step may come before that."""
        if self.compiling:
            self._compile(data.draw(st.sampled_from(sorted(self.compiling))), is_told=is_told)

    def _compile(self, seq_id: SeqId, *, is_told: bool):
        world, asked, grammar = self.compiling[seq_id]
        if grammar.outcome is None:
            assert world.tokens(seq_id) == []
            grammar.outcome = Reading(world, asked)
        if is_told:
            del self.compiling[seq_id]
            assert world.compiled(seq_id, grammar) == []

    @rule(data=st.data())
    def refuse_to_compile(self, data):
        left = [s for s in self.local if s in self.compiling and s not in self.cut]
        left = [seq_id for seq_id in left if self.compiling[seq_id][2].outcome is None]
        if left:
            seq_id = data.draw(st.sampled_from(left))
            _, _, grammar = self.compiling.pop(seq_id)
            grammar.outcome = InvalidRequestError("no such grammar")
            (failed,) = self.target.compiled(seq_id, grammar)
            assert isinstance(failed, Failed)
            self._tell_both(Abort(seq_id=seq_id))

    @rule(asked=ASKED, count=st.integers(1, 5))
    def resume(self, asked: Prompt, count: int):
        """Another engine had drawn the first tokens of a text."""
        alone = prompt(tuple(asked.prompt_tokens), max_tokens=asked.sampling.max_tokens)
        had = tuple(self.target.undisturbed(alone)[:count])
        if had[-1] in EOS or len(had) == alone.sampling.max_tokens:
            return
        self.generate(
            prompt(tuple(alone.prompt_tokens), output=had, max_tokens=alone.sampling.max_tokens)
        )

    @rule(asked=ASKED)
    def prefill_for_target(self, asked: Prompt):
        seq_id = self._new_id()
        self.moving[seq_id] = asked
        self.unasked.add(seq_id)
        self.source.tell(Prefill(seq_id=seq_id, prompt=asked))

    def _ask(self):
        """Pages are asked for once a prompt was begun, so that nobody's are kept for one who waits for those of
        another.
        """
        begun = {SeqId(row.seq.seq_id) for plan in self.source.plans for row in plan.rows}
        for seq_id in sorted(self.unasked & begun):
            self._reserve(seq_id)

    def _reserve(self, seq_id: SeqId):
        self.unasked.remove(seq_id)
        self.target.tell(Receive(seq_id=seq_id, prompt=self.moving[seq_id]))

    @rule(asked=ASKED)
    def generate_on_source(self, asked: Prompt):
        """Competes with the prefills there."""
        self.source.tell(Generate(seq_id=SeqId(f"x{len(self.source.events)}"), prompt=asked))

    @rule(count=st.integers(1, 4))
    def step_source(self, count: int):
        for _ in range(count):
            self.source.step()
            self._ask()

    @rule(count=st.integers(1, 6))
    def step_target(self, count: int):
        for _ in range(count):
            self.target.step()

    @rule(data=st.data())
    def commit(self, data):
        """Finishes one hand-off that is ready."""
        ready = [seq_id for seq_id in self.moving if self._is_ready(seq_id)]
        if ready:
            self._commit(data.draw(st.sampled_from(ready)))

    def _is_ready(self, seq_id: SeqId) -> bool:
        return (
            seq_id not in self.cut | self.started
            and bool(self.source.told(Sampled, seq_id) or self.source.told(PromptComputed, seq_id))
            and bool(self.target.told(Reserved, seq_id))
        )

    def _commit(self, seq_id: SeqId):
        self.started.add(seq_id)
        hand_off(self.source, self.target, seq_id)
        self.source.tell(Release(seq_id=seq_id))

    @rule(data=st.data())
    def abort(self, data):
        known = [*self.local, *self.moving]
        if known:
            self._tell_both(Abort(seq_id=data.draw(st.sampled_from(known))))

    @rule(row=st.integers(0, 5))
    def fail_a_row(self, row: int):
        self.target.step(failing_row=row)
        for seq_id in {*self.local, *self.moving} - self.cut:
            if self.target.told(Failed, seq_id):
                self._tell_both(Abort(seq_id=seq_id))

    def _tell_both(self, command: Abort):
        self.cut.add(command.seq_id)
        if command.seq_id in self.unasked:
            self._reserve(command.seq_id)
        self._tell(command)

    def _tell(self, command: Command):
        self.source.tell(command)
        self.target.tell(command)

    @rule()
    def flush(self):
        self._tell(FlushCache())

    @invariant()
    def books_are_right_and_tokens_undisturbed(self):
        if not hasattr(self, "source"):
            return
        for world in (self.source, self.target):
            world.scheduler.check_integrity()
            load = world.scheduler.load()
            assert load.blocks_free + load.blocks_used + load.blocks_cached == load.blocks_total
        for seq_id, asked in (self.local | self.moving).items():
            for sample in asked.samples:
                drawn = self.target.tokens(seq_id, sample)
                assert drawn == self.target.undisturbed(asked, sample)[: len(drawn)]

    def teardown(self):
        if not hasattr(self, "source"):
            return
        self._finish_all()
        for seq_id, asked in (self.local | self.moving).items():
            if seq_id not in self.cut:
                for sample in asked.samples:
                    assert self.target.tokens(seq_id, sample) == self.target.undisturbed(
                        asked, sample
                    )
            assert self._ends_on_target(seq_id, asked) == 1
        for seq_id in self.moving:
            assert len(self.source.told(Released, seq_id)) == 1
        self.source.assert_empty()
        self.target.assert_empty()

    def _finish_all(self):
        for seq_id in tuple(self.compiling):
            self._compile(seq_id, is_told=True)
        for _ in range(len(self.moving) + 2):
            self.source.run()
            self._ask()
            self.target.run()
            for seq_id in filter(self._is_ready, tuple(self.moving)):
                self._commit(seq_id)
        self.target.run()

    def _ends_on_target(self, seq_id: SeqId, asked: Prompt) -> int:
        samples = [self.target.output.get((seq_id, sample), []) for sample in asked.samples]
        finishes = [sum(token.finish is not None for token in tokens) for tokens in samples]
        assert max(finishes) <= 1
        return (
            (sum(finishes) == len(asked.samples))
            + len(self.target.told(Released, seq_id))
            + len(self.target.told(Failed, seq_id))
        )


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)

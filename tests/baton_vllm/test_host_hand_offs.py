"""The engine's thread and the connector's table over a scheduler by vLLM's rules: prompts for other workers,
and from them.
"""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.clock import ManualClock
from baton.errors import InvalidRequestError, InvariantError
from baton.generation import FinishReason, Prompt, SamplingParams, TokenSample
from baton.ids import SeqId
from baton_engine.messages import (
    Abort,
    Command,
    Failed,
    FlushCache,
    Generate,
    Prefill,
    PrefillStarted,
    PromptComputed,
    Receive,
    Release,
    Released,
    Reserved,
    SeqEvent,
    Start,
    StepEvents,
)
from baton_engine.ports import LayerReady
from baton_engine.scheduling.limits import EngineLimits
from baton_vllm.hand_offs import VllmHandOffs
from baton_vllm.host import VllmEngineHost
from tests.baton_vllm.fake_core import SchedulerCore
from tests.baton_vllm.fake_scheduler import FakeRequest, FakeVllm

BLOCK_TOKENS = 4
NUM_BLOCKS = 16
LIMITS = EngineLimits(
    max_num_seqs=8,
    max_num_batched_tokens=6,
    max_model_len=60,
    block_tokens=BLOCK_TOKENS,
    num_blocks=NUM_BLOCKS,
    vocab_size=100,
)
SEQ = SeqId("leg-1")
COUNTED = SamplingParams(max_tokens=3, presence_penalty=0.5)
"""Of a prompt whose first token is drawn where it is decoded."""


class World:
    """A worker's service: it hands over pages, and lets go of them when it is told to."""

    def __init__(self) -> None:
        hand_offs = VllmHandOffs(sink=self)
        self.core = SchedulerCore(hand_offs, LIMITS)
        self.host = VllmEngineHost(self.core, hand_offs, LIMITS, clock=ManualClock())
        self.host.attach(self._take)
        self.events: list[SeqEvent] = []
        self.prompts: dict[SeqId, Prompt] = {}
        self.drawn: Counter[SeqId] = Counter()
        self.finished: Counter[SeqId] = Counter()
        self.last: dict[SeqId, FinishReason | None] = {}
        self.pages: dict[SeqId, dict[int, int]] = {}
        self.held: dict[SeqId, tuple[int, ...]] = {}
        """Pages that peers read or write."""

    @property
    def vllm(self) -> FakeVllm:
        return self.core.vllm

    def save_kv_layer(self, layer: LayerReady) -> None:
        for export in layer.exports:
            told = self.pages.setdefault(export.seq_id, {})
            told.update(enumerate(export.blocks, export.first_block))

    def submit(self, *commands: Command) -> None:
        """With something to take, a turn never waits."""
        for command in (*commands, FlushCache()):
            self.host.submit(command)
        self.host.turn()
        self._check()

    def ask(
        self,
        kind: type[Generate] | type[Prefill] | type[Receive],
        num_tokens: int = 9,
        *,
        text: int = 0,
        samples: int = 1,
        sampling: SamplingParams | None = None,
        seq_id: SeqId = SEQ,
    ) -> None:
        self.prompts[seq_id] = prompt = Prompt(
            prompt_tokens=(text,) + (1,) * (num_tokens - 1),
            samples=tuple(range(samples)),
            sampling=sampling or SamplingParams(max_tokens=3),
        )
        self.submit(kind(seq_id=seq_id, prompt=prompt))

    def start(self, seq_id: SeqId, *, finish: FinishReason | None = None) -> None:
        prompt = self.prompts[seq_id]
        counts = prompt.sampling.presence_penalty or len(prompt.samples) > 1
        first = () if counts else (TokenSample(sample=0, token=5, finish=finish),)
        self.held.pop(seq_id, None)
        self.submit(Start(seq_id=seq_id, first_tokens=first))

    def let_go(self, command: Abort | Release) -> None:
        self.held.pop(command.seq_id, None)
        self.submit(command)

    def run(self) -> None:
        """Until nothing would happen any more without a command."""
        for _ in range(500):
            if not self.host._has_work():
                return
            self.submit()
        raise AssertionError("steps without end")

    def of(self, kind: type[SeqEvent]) -> list[SeqEvent]:
        return [event for event in self.events if isinstance(event, kind)]

    def ends(self, seq_id: SeqId) -> int:
        told = [event for event in self.events if event.seq_id == seq_id]
        ends = sum(isinstance(event, Released | Failed) for event in told)
        if seq_id in self.pages:
            return ends  # its first token may be its last, and its pages are kept all the same
        return ends + (self.finished[seq_id] == len(self.prompts[seq_id].samples))

    def _take(self, told: StepEvents) -> None:
        for event in told.events:
            self.events.append(event)
            match event:
                case Reserved():
                    self.held[event.seq_id] = event.blocks[event.held_blocks :]
                case PromptComputed():
                    self.held[event.seq_id] = tuple(self.pages[event.seq_id].values())
                case Released():
                    assert event.seq_id not in self.held
                    assert event.seq_id not in self.vllm.requests
        if (sampled := told.sampled) is None:
            return
        for seq_id, finish in zip(sampled.seq_ids, sampled.finish_reasons, strict=True):
            self.drawn[seq_id] += 1
            self.finished[seq_id] += finish is not None
            self.last[seq_id] = finish
            if seq_id in self.pages:
                self.held[seq_id] = tuple(self.pages[seq_id].values())

    def _check(self) -> None:
        for seq_id, blocks in self.held.items():
            mine = self.vllm.requests[seq_id].blocks
            assert set(blocks) <= set(mine), "pages were given back while a peer used them"


@pytest.fixture
def world() -> World:
    return World()


def test_a_prompt_for_another_worker_draws_one_token_and_keeps_its_pages_until_release(world):
    world.ask(Prefill)
    world.run()

    assert world.of(PrefillStarted) == [
        PrefillStarted(seq_id=SEQ, num_blocks=3, cached_tokens=0),
    ]
    assert (world.drawn[SEQ], world.last[SEQ]) == (1, None)
    assert len(world.vllm.free) == NUM_BLOCKS - 3
    world.let_go(Release(seq_id=SEQ))
    world.run()
    assert world.of(Released) == [Released(seq_id=SEQ)]
    assert len(world.vllm.free) == NUM_BLOCKS


def test_while_pages_are_kept_and_nothing_else_is_to_be_done_no_step_is_computed(world):
    world.ask(Prefill, 40)
    world.run()
    world.ask(Generate, 40, text=1, seq_id=SeqId("leg-2"))
    world.run()

    assert not world.host._has_work()
    assert world.drawn[SeqId("leg-2")] == 0
    world.let_go(Release(seq_id=SEQ))
    world.run()
    assert world.finished[SeqId("leg-2")] == 1


def test_a_first_token_that_uses_up_what_may_be_generated_ends_its_sample(world):
    world.ask(Prefill, sampling=SamplingParams(max_tokens=1))
    world.run()

    assert world.last[SEQ] is FinishReason.LENGTH


def test_a_received_prompt_goes_on_from_the_token_that_was_drawn_elsewhere(world):
    world.ask(Receive, sampling=SamplingParams(max_tokens=3, min_tokens=2, prompt_logprobs=1))
    world.run()
    (reserved,) = world.of(Reserved)
    assert isinstance(reserved, Reserved)
    assert (len(reserved.blocks), reserved.held_blocks) == (3, 0)

    world.start(SEQ)
    world.run()

    asked = world.core.asked[SEQ].params
    assert (asked["max_tokens"], asked["min_tokens"], asked["prompt_logprobs"]) == (2, 1, None)
    assert world.core.went_on == {SEQ: 5}
    assert (world.drawn[SEQ], world.ends(SEQ)) == (2, 1)
    assert not world.of(PrefillStarted)
    assert len(world.vllm.free) == NUM_BLOCKS


def test_where_the_output_is_counted_the_receiving_worker_draws_the_first_token(world):
    world.ask(Prefill, sampling=COUNTED)
    world.ask(Receive, sampling=COUNTED, text=1, seq_id=SeqId("leg-2"))
    world.run()
    assert world.of(PromptComputed) == [PromptComputed(seq_id=SEQ)]
    assert world.drawn[SEQ] == 0
    assert "presence_penalty" not in world.core.asked[SEQ].params

    world.start(SeqId("leg-2"))
    world.let_go(Release(seq_id=SEQ))
    world.run()

    assert world.core.asked["leg-2"].params["presence_penalty"] == 0.5
    assert world.core.went_on == {}
    assert world.drawn[SeqId("leg-2")] == 3
    assert len(world.vllm.free) == NUM_BLOCKS


def test_several_samples_go_on_from_one_received_prompt_and_are_told_together(world):
    world.ask(Receive, samples=3)
    world.run()
    assert set(world.core.asked) == {SEQ}

    world.start(SEQ)
    world.run()

    assert set(world.core.asked) == {SEQ, f"{SEQ}/1", f"{SEQ}/2"}
    assert (world.drawn[SEQ], world.finished[SEQ]) == (9, 3)
    assert len(world.vllm.free) == NUM_BLOCKS


def test_further_samples_find_the_received_prompt_and_do_not_compute_it_again(world):
    computed: Counter[str] = Counter()

    def count(scheduled: list[tuple[FakeRequest, int]]) -> None:
        computed.update({request.request_id: num_tokens for request, num_tokens in scheduled})

    world.core.compute = count
    world.ask(Receive, 10, samples=3)
    world.run()
    world.start(SEQ)
    world.run()

    behind_full_blocks = 10 % BLOCK_TOKENS
    assert computed == {
        SEQ: 1 + 2,
        f"{SEQ}/1": behind_full_blocks + 2,
        f"{SEQ}/2": behind_full_blocks + 2,
    }


def test_a_first_token_that_is_the_last_leaves_nothing_to_generate(world):
    world.ask(Receive)
    world.run()

    world.start(SEQ, finish=FinishReason.STOP)
    world.run()

    assert world.ends(SEQ) == 0
    assert not world.vllm.requests


@pytest.mark.parametrize("told", [(), (TokenSample(sample=4, token=5),)])
def test_first_tokens_that_were_not_asked_for_fail_their_sequence_alone(world, told):
    world.ask(Receive)
    world.run()
    world.held.clear()

    world.submit(Start(seq_id=SEQ, first_tokens=told))
    world.run()

    (failed,) = world.of(Failed)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, InvalidRequestError)
    assert world.ends(SEQ) == 1
    assert len(world.vllm.free) == NUM_BLOCKS


def test_a_start_without_a_reservation_fails_its_sequence_alone(world):
    world.ask(Prefill, 56, seq_id=SeqId("leg-0"))
    world.run()
    world.ask(Receive)
    world.run()

    world.start(SEQ)

    (failed,) = world.of(Failed)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, InvariantError)
    world.let_go(Release(seq_id=SeqId("leg-0")))
    world.run()
    assert len(world.vllm.free) == NUM_BLOCKS


KINDS = st.sampled_from([Generate, Prefill, Receive])
ACTIONS = st.one_of(
    st.tuples(
        KINDS,
        st.integers(0, 2),
        st.integers(1, 40),
        st.integers(1, 9),
        st.integers(1, 3),
        st.booleans(),
    ),
    st.tuples(st.sampled_from(["start", "start", "finished", "release", "abort"]), st.integers(0)),
    st.just(("turn",)),
    st.just(("turn",)),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(ACTIONS, max_size=60))
def test_in_whatever_order_hand_offs_end_each_sequence_ends_once_and_every_page_comes_back(actions):
    """Releases and aborts stand for whatever a peer's end leads to; the scheduler preempts by itself."""
    world = World()
    over: set[SeqId] = set()
    started: set[SeqId] = set()
    for action in actions:
        seqs = list(world.prompts)
        reserved = [event.seq_id for event in world.of(Reserved) if event.seq_id in world.held]
        kept = [seq_id for seq_id in world.held if seq_id not in reserved]
        match action:
            case ("turn",):
                world.submit()
            case ("start", number) if reserved:
                started.add(seq_id := reserved[number % len(reserved)])
                world.start(seq_id)
            case ("finished", number) if reserved:
                over.add(seq_id := reserved[number % len(reserved)])
                world.start(seq_id, finish=FinishReason.STOP)
            case ("release", number) if kept:
                world.let_go(Release(seq_id=kept[number % len(kept)]))
            case ("abort", number) if seqs:
                over.add(seq_id := seqs[number % len(seqs)])
                world.let_go(Abort(seq_id=seq_id))
            case (type() as kind, text, num_tokens, max_tokens, samples, counts):
                world.ask(
                    kind,
                    num_tokens,
                    text=text,
                    samples=samples,
                    sampling=SamplingParams(
                        max_tokens=max_tokens, presence_penalty=0.5 if counts else 0.0
                    ),
                    seq_id=SeqId(f"leg-{len(seqs)}"),
                )
    for _ in world.prompts:  # what waits for pages gets them, one reservation after the other
        world.run()
        for seq_id in list(world.held):
            if seq_id in world.pages:
                world.let_go(Release(seq_id=seq_id))
            else:
                started.add(seq_id)
                world.start(seq_id)
    world.run()

    assert not world.vllm.requests
    assert len(world.vllm.free) == NUM_BLOCKS
    assert not world.host._sequences
    failed = {event.seq_id for event in world.of(Failed)}
    for seq_id, prompt in world.prompts.items():
        assert world.ends(seq_id) <= 1
        if seq_id in over or seq_id in failed:
            continue
        assert world.ends(seq_id) == 1 or seq_id in world.pages, seq_id
        drawn_here = len(prompt.samples) * prompt.sampling.max_tokens
        counts = prompt.sampling.presence_penalty or len(prompt.samples) > 1
        if seq_id in started and not counts:
            drawn_here -= 1
        if seq_id not in world.pages:
            assert world.drawn[seq_id] == drawn_here

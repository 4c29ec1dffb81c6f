"""The connector's table against vLLM's scheduler: whatever ends when, no block is lost or given back too early."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import InvariantError
from baton.ids import SeqId
from baton.page_order import num_pages, pages_in_order
from baton_engine.messages import PrefillStarted, Released, Reserved, SeqEvent
from baton_engine.ports import LayerReady
from baton_vllm.hand_offs import VllmHandOffs
from tests.baton_vllm.fake_scheduler import NULL, NUM_LAYERS, FakeRequest, FakeVllm

BLOCK_TOKENS = 4
NUM_BLOCKS = 17
PROMPT_TOKENS = 13


class World:
    """A host over the table and the scheduler, and what is going on with its pages elsewhere."""

    def __init__(self, num_blocks: int = NUM_BLOCKS, windows: Sequence[int] = ()) -> None:
        self.hand_offs = VllmHandOffs(sink=self)
        self.num_blocks, self.windows = num_blocks, windows
        self.vllm = FakeVllm(
            self.hand_offs,
            num_blocks=num_blocks,
            block_tokens=BLOCK_TOKENS,
            budget=6,
            windows=windows,
        )
        self.events: list[SeqEvent] = []
        self.written: dict[SeqId, tuple[int, ...]] = {}
        self.pages: dict[tuple[SeqId, int], dict[int, int]] = {}
        self.kinds: dict[SeqId, str] = {}
        self.lengths: dict[SeqId, int] = {}

    def save_kv_layer(self, layer: LayerReady) -> None:
        for export in layer.exports:
            told = self.pages.setdefault((export.seq_id, layer.layer_index), {})
            for index, block in enumerate(export.blocks, export.first_block):
                told[index] = block

    def submit(
        self, kind: str, text: int, num_tokens: int, max_tokens: int = 3, name: str = ""
    ) -> SeqId:
        seq_id = SeqId(name or f"{kind}-{len(self.kinds)}")
        self.kinds[seq_id], self.lengths[seq_id] = kind, num_tokens
        if kind == "prefill":
            self.hand_offs.prefill(seq_id, num_tokens)
            max_tokens = 1
        elif kind == "receive":
            self.hand_offs.receive(seq_id, num_tokens, room_tokens=num_tokens + 1)
        self.vllm.add_request(FakeRequest(seq_id, text, num_tokens, max_tokens))
        return seq_id

    def kept(self, seq_id: SeqId) -> list[int]:
        """vLLM's blocks of a prompt, in the order in which they are handed off."""
        num_tokens = self.lengths[seq_id]
        end = -(-num_tokens // BLOCK_TOKENS)
        order = pages_in_order(num_tokens, BLOCK_TOKENS, self.windows, start=0, end=end)
        tables = self.vllm.requests[seq_id].tables
        return [tables[group][block] for block, group in order]

    def start(self, seq_id: SeqId, *, goes_on: bool = True) -> None:
        if seq_id not in self.written:
            return
        del self.written[seq_id]
        self.hand_offs.start(seq_id, goes_on=goes_on)
        if goes_on:
            self.vllm.requests[seq_id].num_prompt += 1
        else:
            self.vllm.abort(seq_id)

    def end(self, seq_id: SeqId) -> None:
        """A release or an abort: nobody reads or writes the pages any more."""
        self.written.pop(seq_id, None)
        self.hand_offs.end(seq_id)
        self.vllm.abort(seq_id)

    def step(self) -> None:
        self.vllm.step()
        self._take(self.hand_offs.take_events())
        for seq_id, blocks in self.written.items():
            kept = self.kept(seq_id)
            assert kept[len(kept) - len(blocks) :] == list(blocks)
            assert all(self.vllm.references[block] == 1 for block in blocks)
        for (seq_id, _), told in self.pages.items():
            request = self.vllm.requests.get(seq_id)
            if request is not None and request.status == "FINISHED" and request.num_output:
                assert told == dict(enumerate(self.kept(seq_id)))

    def _take(self, events: Sequence[SeqEvent]) -> None:
        for event in events:
            self.events.append(event)
            match event:
                case Reserved():
                    self.written[event.seq_id] = event.blocks[event.held_blocks :]
                case Released():
                    assert event.seq_id not in self.vllm.requests
                    assert event.seq_id not in self.written
                case PrefillStarted():
                    num_tokens = self.lengths[event.seq_id]
                    assert event.num_blocks == num_pages(num_tokens, BLOCK_TOKENS, self.windows)

    def is_full(self) -> bool:
        return len(self.vllm.free) == self.num_blocks - 1

    def of(self, kind: type[SeqEvent]) -> list[SeqEvent]:
        return [event for event in self.events if isinstance(event, kind)]


def steps(world: World, count: int = 12) -> None:
    for _ in range(count):
        world.step()


def test_prefilled_pages_are_told_layer_by_layer_and_kept_until_they_are_released():
    world = World()
    seq_id = world.submit("prefill", 0, PROMPT_TOKENS)

    steps(world)

    blocks = world.vllm.requests[seq_id].blocks
    assert world.pages == {(seq_id, layer): dict(enumerate(blocks)) for layer in (0, 1)}
    is_quiet = not world.hand_offs.has_news
    assert is_quiet
    assert not world.of(Released)
    world.end(seq_id)
    assert world.hand_offs.has_news
    world.step()
    assert world.of(Released) == [Released(seq_id=seq_id)]
    assert world.is_full()


def test_received_prompt_waits_with_all_of_its_blocks_and_then_computes_one_token_a_step():
    world = World()
    seq_id = world.submit("receive", 0, PROMPT_TOKENS, max_tokens=2)
    steps(world, 3)
    (reserved,) = world.of(Reserved)
    assert isinstance(reserved, Reserved)
    assert (len(reserved.blocks), reserved.held_blocks) == (4, 0)

    world.start(seq_id)
    world.step()
    world.step()
    assert world.vllm.requests[seq_id].num_computed == PROMPT_TOKENS + 1
    world.step()

    assert not world.vllm.requests
    assert not world.of(Released)  # its tokens' finish reason tells its end


def test_blocks_that_the_prefix_cache_has_are_held_and_not_written():
    world = World()
    world.submit("generate", 0, PROMPT_TOKENS)
    steps(world)

    world.submit("receive", 0, PROMPT_TOKENS)
    world.step()

    (reserved,) = world.of(Reserved)
    assert isinstance(reserved, Reserved)
    assert reserved.held_blocks == 3


@pytest.mark.parametrize("started", [False, True])
def test_aborted_while_it_waits_for_kv_its_blocks_come_back_with_the_next_step(started: bool):
    world = World()
    seq_id = world.submit("receive", 0, PROMPT_TOKENS)
    world.step()
    if started:
        world.start(seq_id)

    world.end(seq_id)
    assert seq_id in world.vllm.requests
    world.step()

    assert world.of(Released) == [Released(seq_id=seq_id)]
    assert world.is_full()


def test_with_nothing_left_to_generate_the_end_is_not_told():
    world = World()
    seq_id = world.submit("receive", 0, PROMPT_TOKENS)
    world.step()
    world.start(seq_id, goes_on=False)
    world.step()

    assert not world.of(Released)
    assert not world.vllm.requests


def test_prompt_that_is_preempted_is_told_again_from_its_first_page():
    world = World(num_blocks=7)
    world.submit("generate", 1, 6, max_tokens=8)
    seq_id = world.submit("prefill", 0, 14)
    steps(world, 40)

    started = [e for e in world.of(PrefillStarted) if e.seq_id == seq_id]
    assert len(started) > 1
    blocks = world.vllm.requests[seq_id].blocks
    assert world.pages[seq_id, 1] == dict(enumerate(blocks))


def test_prompts_for_other_workers_do_not_preempt_each_other_and_keep_their_order():
    """A prompt that is begun has its pages reserved elsewhere: it must not wait for those that are kept here."""
    world = World()
    names = [world.submit("prefill", text, 40) for text in (0, 1)]
    names.append(world.submit("prefill", 2, 4))
    steps(world, 20)

    started = [event.seq_id for event in world.of(PrefillStarted)]
    assert started == names[:1], "no other one fits beside it, and a short one does not overtake"
    world.end(names[0])
    steps(world, 20)
    assert [event.seq_id for event in world.of(PrefillStarted)] == names


def test_a_start_without_a_reservation_or_of_one_that_is_gone_is_a_broken_invariant():
    world = World()
    seq_id = world.submit("receive", 0, PROMPT_TOKENS)

    with pytest.raises(InvariantError):
        world.hand_offs.start(seq_id, goes_on=True)
    with pytest.raises(InvariantError):
        world.hand_offs.start(SeqId("gone"), goes_on=True)
    with pytest.raises(InvariantError):
        world.hand_offs.prefill(seq_id, 3)


def test_of_a_group_with_a_window_only_what_the_prompts_end_attends_to_is_kept_and_told():
    world = World(windows=(0, 5))
    seq_id = world.submit("prefill", 0, PROMPT_TOKENS)

    steps(world)

    full, windowed = world.vllm.requests[seq_id].tables
    assert [block == NULL for block in windowed] == [True, True, False, False]
    pages = [full[0], full[1], full[2], windowed[2], full[3], windowed[3]]
    told = dict(enumerate(pages))
    assert world.pages == {(seq_id, layer): told for layer in range(NUM_LAYERS)}


def test_a_received_prompt_has_no_blocks_that_have_left_a_window_and_holds_what_all_groups_have():
    world = World(num_blocks=40, windows=(0, 5))
    world.submit("generate", 0, 17)
    steps(world)

    seq_id = world.submit("receive", 0, 18)
    world.step()

    (reserved,) = world.of(Reserved)
    assert isinstance(reserved, Reserved)
    assert (len(reserved.blocks), reserved.held_blocks) == (5 + 2, 4 + 1)
    assert list(reserved.blocks) == world.kept(seq_id)
    assert NULL not in reserved.blocks


WINDOWS = st.sampled_from([(), (4,), (1, 0), (0, 5), (6, 0, 3), (0, 0, 9)])


@settings(max_examples=200, deadline=None)
@given(
    WINDOWS,
    st.lists(st.tuples(st.sampled_from(["prefill", "receive"]), st.integers(1, 40)), max_size=12),
    st.randoms(use_true_random=False),
)
def test_prompts_that_are_handed_off_go_through_whatever_their_windows_and_none_is_preempted(
    windows, prompts, random
):
    """All fit by themselves. One that is begun needs nobody else's blocks to come to its end."""
    world = World(num_blocks=34, windows=windows)
    open_ones = [world.submit(kind, text, size) for text, (kind, size) in enumerate(prompts)]
    while open_ones:
        steps(world, 40)
        waits = [seq_id for seq_id in open_ones if seq_id in world.written]
        kept = [seq_id for seq_id in open_ones if (seq_id, 0) in world.pages]
        assert waits or kept, "nothing goes on though nothing else is left"
        seq_id = random.choice(waits + kept)
        world.start(seq_id)
        steps(world, 8)
        world.end(seq_id)
        open_ones.remove(seq_id)
    world.step()

    started = [event.seq_id for event in world.of(PrefillStarted)]
    assert len(started) == len(set(started)) == sum(kind == "prefill" for kind, _ in prompts)
    assert world.is_full()


KINDS = st.sampled_from(["prefill", "receive", "generate"])
ACTIONS = st.one_of(
    st.tuples(KINDS, st.integers(0, 2), st.integers(1, 40), st.integers(1, 9)),
    st.tuples(st.sampled_from(["start", "nothing left", "end"]), st.integers(0, 30)),
    st.just(("step",)),
    st.just(("step",)),
)


@settings(max_examples=300, deadline=None)
@given(WINDOWS, st.lists(ACTIONS, max_size=60))
def test_whatever_ends_in_whatever_order_every_block_comes_back_and_none_too_early(
    windows, actions
):
    world = World(windows=windows)
    for action in actions:
        seqs = list(world.kinds)
        match action:
            case ("step",):
                world.step()
            case ("start", number) if seqs:
                world.start(seqs[number % len(seqs)])
            case ("nothing left", number) if seqs:
                world.start(seqs[number % len(seqs)], goes_on=False)
            case ("end", number) if seqs:
                world.end(seqs[number % len(seqs)])
            case (str() as kind, int() as text, int() as num_tokens, int() as max_tokens):
                world.submit(kind, text, num_tokens, max_tokens)
    for seq_id in world.kinds:
        world.end(seq_id)
    world.step()

    assert not world.vllm.requests
    assert world.is_full()
    assert not world.hand_offs.has_news
    released = [event.seq_id for event in world.of(Released)]
    assert len(released) == len(set(released))
    prefilled = {seq_id for seq_id, kind in world.kinds.items() if kind == "prefill"}
    assert prefilled <= set(released)

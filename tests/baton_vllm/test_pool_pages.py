"""Workers over schedulers by vLLM's rules, and a pool: what comes from it is what would have been computed,
or is computed.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.clock import ManualClock
from baton.generation import FinishReason, Prompt, SamplingParams, TokenSample
from baton.hashing import chain_keys, root_key
from baton.ids import BlockKey, LayerName, SeqId
from baton.layout import KvLayout
from baton_engine.fakes.engine import FakeRunner, _mix
from baton_engine.fakes.pool import FakeKvSource
from baton_engine.messages import (
    Abort,
    Command,
    Failed,
    Generate,
    Prefill,
    PrefillStarted,
    Receive,
    Release,
    Reserved,
    SeqEvent,
    Start,
    StepEvents,
)
from baton_engine.ports import LayerReady
from baton_engine.scheduling.limits import EngineLimits
from baton_vllm.hand_offs import VllmHandOffs
from baton_vllm.host import VllmEngineHost
from baton_vllm.pool_pages import VllmPoolPages
from tests.baton_vllm.fake_core import PagedCore

BLOCK_TOKENS = 4
NUM_BLOCKS = 16
VOCAB = 50
SECRET = bytes(32)
LAYOUT = KvLayout(
    model_fingerprint="model=tiny vllm=0.32.0",
    dtype="float32",
    block_tokens=BLOCK_TOKENS,
    num_kv_heads=1,
    head_dim=1,
    layers=(LayerName("layer.0"), LayerName("layer.1")),
)
LIMITS = EngineLimits(
    max_num_seqs=8,
    max_num_batched_tokens=6,
    max_model_len=60,
    block_tokens=BLOCK_TOKENS,
    num_blocks=NUM_BLOCKS,
    vocab_size=VOCAB,
)
ORACLE = FakeRunner(LIMITS)


def expected(tokens: Sequence[int], count: int, sample: int = 0) -> list[int]:
    return list(islice(ORACLE.draw_all(tuple(tokens), sample), count))


class Worker:
    """vLLM's engine thread with a pool, and a service that keeps and gives back pages."""

    def __init__(self, pool: FakeKvSource) -> None:
        self.pages = [[-1] * BLOCK_TOKENS for _ in range(NUM_BLOCKS)]
        self.source = pool.source(self.pages)
        self.pool_pages = VllmPoolPages()
        self.sink = pool.block_sink(self.pages, self.pool_pages.generation)
        hand_offs = VllmHandOffs(sink=self)
        self.core = PagedCore(hand_offs, LIMITS, self.pages, self.pool_pages)
        self.host = VllmEngineHost(
            self.core, hand_offs, LIMITS, pool_pages=self.pool_pages, clock=ManualClock()
        )
        self.pool_pages.name_by(SECRET, LAYOUT)
        self.host.connect_pool(self.source, self.sink)
        self.host.attach(self._take)
        self.prompts: dict[SeqId, Prompt] = {}
        self.events: list[SeqEvent] = []
        self.drawn: dict[SeqId, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.exported: dict[SeqId, dict[int, list[int]]] = defaultdict(dict)
        self.reserved: dict[SeqId, Reserved] = {}

    def save_kv_layer(self, layer: LayerReady) -> None:
        for export in layer.exports:
            for index, block in enumerate(export.blocks, export.first_block):
                self.exported[export.seq_id][index] = list(self.pages[block])

    def submit(self, *commands: Command) -> None:
        """With something to take, a turn never waits."""
        for command in commands or (Abort(seq_id=SeqId("nobody")),):
            self.host.submit(command)
        self.host.turn()

    def ask(
        self,
        kind: type[Generate] | type[Prefill] | type[Receive],
        tokens: tuple[int, ...],
        max_tokens: int = 3,
        *,
        samples: int = 1,
        name: str = "",
        **sampling: int,
    ) -> SeqId:
        seq_id = SeqId(name or f"leg-{len(self.prompts)}")
        self.prompts[seq_id] = prompt = Prompt(
            prompt_tokens=tokens,
            samples=tuple(range(samples)),
            sampling=SamplingParams(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
            tenant="someone",
        )
        self.host.submit(kind(seq_id=seq_id, prompt=prompt))
        return seq_id

    def start(self, seq_id: SeqId) -> None:
        """Another worker has written the prompt's pages."""
        prompt, reserved = self.prompts[seq_id], self.reserved.pop(seq_id)
        for place, kv in enumerate(slots(prompt.tokens)):
            page, slot = divmod(place, BLOCK_TOKENS)
            if page >= reserved.held_blocks:
                self.pages[reserved.blocks[page]][slot] = kv
        first = [
            TokenSample(sample=0, token=token)
            for token in expected(prompt.tokens, 1)
            if len(prompt.samples) == 1
        ]
        if first and prompt.sampling.max_tokens == 1:
            first = [replace(first[0], finish=FinishReason.LENGTH)]
        self.drawn[seq_id][0] += [each.token for each in first]
        self.submit(Start(seq_id=seq_id, first_tokens=tuple(first)))

    def run(self) -> None:
        """Until nothing would happen any more without a command."""
        self.submit()
        for _ in range(500):
            if not self.host._has_work():
                return
            self.submit()
        raise AssertionError("steps without end")

    def started(self, seq_id: SeqId) -> list[tuple[int, int]]:
        """Cached tokens and pooled ones, each time that it was begun."""
        return [
            (event.cached_tokens, event.pooled_tokens)
            for event in self.events
            if isinstance(event, PrefillStarted) and event.seq_id == seq_id
        ]

    def assert_empty(self) -> None:
        assert not self.core.vllm.requests
        assert len(self.core.vllm.free) == NUM_BLOCKS
        assert not self.pool_pages.promised_blocks
        assert {*self.prompts} <= {*self.source.forgotten}, "a lease is kept for ever"

    def _take(self, told: StepEvents) -> None:
        for event in told.events:
            self.events.append(event)
            if isinstance(event, Reserved):
                self.reserved[event.seq_id] = event
        if (sampled := told.sampled) is not None:
            for seq_id, sample, token in zip(
                sampled.seq_ids, sampled.samples, sampled.tokens, strict=True
            ):
                self.drawn[seq_id][sample].append(token)


def keys_of(tokens: tuple[int, ...]) -> list[BlockKey]:
    return chain_keys(SECRET, root_key(SECRET, scope="", layout=LAYOUT), tokens, BLOCK_TOKENS)


def slots(tokens: Sequence[int]) -> list[int]:
    """What stands in pages for each token of a text."""
    return list(accumulate(tokens, _mix, initial=0))[1:]


def contents(tokens: tuple[int, ...]) -> dict[BlockKey, list[int]]:
    """What the blocks of a text are to hold."""
    kv, size = slots(tokens), BLOCK_TOKENS
    return {key: kv[i * size : (i + 1) * size] for i, key in enumerate(keys_of(tokens))}


@pytest.fixture
def pool() -> FakeKvSource:
    return FakeKvSource()


TEXT = tuple(range(1, 15))


def test_a_worker_fetches_what_another_one_has_computed_and_computes_the_rest(pool):
    first, second = Worker(pool), Worker(pool)
    before = first.ask(Generate, TEXT, 8)
    first.run()
    after = second.ask(Generate, TEXT, 8)

    second.run()

    assert first.drawn[before] == second.drawn[after] == {0: expected(TEXT, 8)}
    assert first.started(before) == [(0, 0)]
    assert second.started(after) == [(0, 12)]
    assert set(keys_of((*TEXT, *expected(TEXT, 7)))) == set(pool.blocks), "output is pooled too"
    second.assert_empty()


def test_what_is_held_here_is_not_fetched(pool):
    first, second = Worker(pool), Worker(pool)
    first.ask(Generate, TEXT)
    first.run()
    second.ask(Generate, TEXT[:9], 1)
    second.run()
    second.source.fetched.clear()

    seq_id = second.ask(Generate, TEXT)
    second.run()

    assert second.started(seq_id) == [(8, 4)]
    assert [(fetch.first_block, len(fetch.keys)) for fetch in second.source.fetched] == [(2, 1)]
    assert second.drawn[seq_id] == {0: expected(TEXT, 3)}


def test_a_prompt_for_another_worker_is_fetched_and_all_of_its_pages_are_told(pool):
    first, second = Worker(pool), Worker(pool)
    first.ask(Generate, TEXT)
    first.run()
    seq_id = second.ask(Prefill, TEXT)
    second.run()

    assert second.started(seq_id) == [(0, 12)]
    told = second.exported[seq_id]
    assert [told[index] for index in range(3)] == [*contents(TEXT).values()][:3]
    assert sorted(told) == [0, 1, 2, 3]
    assert second.drawn[seq_id] == {0: expected(TEXT, 1)}
    second.submit(Release(seq_id=seq_id))
    second.run()
    second.assert_empty()


@pytest.mark.parametrize("held", [0, 9])
@pytest.mark.parametrize("kind", [Generate, Prefill])
def test_what_comes_with_wrong_bytes_is_computed_and_never_found(pool, kind, held):
    first, second = Worker(pool), Worker(pool)
    first.ask(Generate, TEXT)
    first.run()
    if held:
        second.ask(Generate, TEXT[:held], 1, name="before")
        second.run()
    pool.corrupt.update(keys_of(TEXT)[2:])

    seq_id = second.ask(kind, TEXT)
    second.run()
    again = second.ask(Generate, TEXT)
    second.run()

    assert second.started(seq_id) == [(held // 4 * 4, 0)]
    assert second.drawn[seq_id][0][0] == expected(TEXT, 1)[0]
    assert second.drawn[again] == {0: expected(TEXT, 3)}
    assert second.started(again) == [(12, 0)]


def test_samples_of_a_prompt_fetch_it_once(pool):
    first, second = Worker(pool), Worker(pool)
    first.ask(Generate, TEXT)
    first.run()
    seq_id = second.ask(Generate, TEXT, samples=3)
    second.run()

    assert len(second.source.fetched) == 1
    assert second.drawn[seq_id] == {sample: expected(TEXT, 3, sample) for sample in range(3)}
    second.assert_empty()


def test_a_lease_is_given_back_once_the_prompt_is_begun(pool):
    first, second = Worker(pool), Worker(pool)
    first.ask(Generate, TEXT)
    first.run()
    seq_id = second.ask(Generate, TEXT, 30)

    while not second.started(seq_id):
        assert not second.source.forgotten
        second.submit()

    assert second.source.forgotten == [seq_id]


def test_prompts_that_are_fetched_leave_each_other_room_to_go_on(pool):
    """Of 16 pages each takes 8, and needs one more for its next token."""
    first, second = Worker(pool), Worker(pool)
    texts = [(text,) * 33 for text in (8, 9)]
    for text in texts:
        first.ask(Generate, text, 1)
        first.run()
    names = [second.ask(Generate, text) for text in texts]

    second.run()

    assert [second.drawn[name][0] for name in names] == [expected(text, 3) for text in texts]
    second.assert_empty()


def test_a_prompt_for_another_worker_waits_for_the_pages_that_are_promised_to_a_fetched_one(pool):
    first, second = Worker(pool), Worker(pool)
    first.ask(Generate, (8,) * 17, 1)
    first.run()
    fetched = second.ask(Generate, (8,) * 17 + (7,) * 28, 1)
    handed_off = second.ask(Prefill, (9,) * 33)

    second.run()

    assert second.started(fetched) == [(0, 16)]
    assert second.started(handed_off) == [(0, 0)], "it was preempted"


def test_a_prompt_whose_every_token_is_scored_is_computed(pool):
    first, second = Worker(pool), Worker(pool)
    first.ask(Generate, TEXT)
    first.run()
    seq_id = second.ask(Generate, TEXT, prompt_logprobs=1)
    second.run()

    assert not second.source.fetched
    assert second.started(seq_id) == [(0, 0)]


def test_what_was_preempted_asks_for_its_blocks_again(pool):
    worker = Worker(pool)
    names = [worker.ask(Generate, (text, *TEXT), 30) for text in range(20, 22)]
    worker.run()

    wanted = [seq_id for seq_id, _ in worker.source.wanted]
    assert wanted
    assert {*wanted} <= {*names}
    for seq_id in names:
        text = worker.prompts[seq_id].prompt_tokens
        assert worker.drawn[seq_id] == {0: expected(text, 30)}
    worker.assert_empty()


def test_a_page_that_was_handed_out_again_is_not_pooled(pool):
    worker = Worker(pool)
    worker.sink.eager = False
    worker.ask(Generate, TEXT, 1)
    worker.run()
    for text in range(20, 25):
        worker.ask(Generate, (text,) * 40, 1)
    worker.run()

    worker.sink.copy_all()

    assert not {*keys_of(TEXT)} & {*pool.blocks}
    assert pool.blocks


def test_a_refused_prompt_gives_back_what_was_leased_for_it(pool):
    worker = Worker(pool)
    seq_id = worker.ask(Generate, (1,) * 61)
    worker.run()

    assert [type(event) for event in worker.events] == [Failed]
    assert worker.source.forgotten == [seq_id]


TEXTS = [TEXT, (*TEXT[:8], *TEXT[:22]), (9,) * 33, (9,) * 12 + (8,) * 6, (3,)]
ACTIONS = st.one_of(
    st.tuples(
        st.sampled_from([Generate, Generate, Prefill, Receive]),
        st.integers(0, 1),
        st.integers(0, len(TEXTS) - 1),
        st.integers(1, 9),
        st.integers(1, 2),
    ),
    st.tuples(
        st.sampled_from(["end", "copy", "corrupt", "expire", "start", "turn", "turn", "turn"]),
        st.integers(0, 1),
        st.integers(0, 30),
    ),
)


class Cluster:
    """Two workers over one pool, to which pages are copied some time after they were offered."""

    def __init__(self) -> None:
        self.pool = FakeKvSource()
        self.workers = [Worker(self.pool), Worker(self.pool)]
        self.over: set[tuple[Worker, SeqId]] = set()
        for worker in self.workers:
            worker.sink.eager = False

    def act(self, what: str, worker: Worker, number: int) -> None:
        names, held = list(worker.prompts), list(self.pool.blocks)
        match what:
            case "copy":
                worker.sink.copy_all()
            case "corrupt" if held:
                self.pool.corrupt ^= {held[number % len(held)]}
            case "expire" if names:
                worker.source.expiring.add(names[number % len(names)])
            case "end" if names:
                self.end(worker, names[number % len(names)])
            case "start" if worker.reserved:
                worker.start([*worker.reserved][number % len(worker.reserved)])
            case "turn":
                worker.submit()

    def end(self, worker: Worker, seq_id: SeqId) -> None:
        self.over.add((worker, seq_id))
        worker.reserved.pop(seq_id, None)
        worker.submit(Abort(seq_id=seq_id))

    def finish(self, worker: Worker) -> None:
        """Whatever still waits for another worker gets what it waits for."""
        for _ in range(2 * len(worker.prompts) + 1):
            worker.run()
            for seq_id in [*worker.exported]:
                worker.submit(Release(seq_id=seq_id))
            for seq_id in [*worker.reserved]:
                worker.start(seq_id)
        worker.run()


@settings(max_examples=200, deadline=None)
@given(st.lists(ACTIONS, max_size=40))
def test_in_whatever_order_prompts_come_and_end_no_token_is_wrong_and_every_page_comes_back(
    actions,
):
    cluster = Cluster()
    for action in actions:
        worker = cluster.workers[action[1]]
        match action:
            case (str() as what, _, number):
                cluster.act(what, worker, number)
            case (kind, _, text, max_tokens, samples):
                worker.ask(kind, TEXTS[text], max_tokens, samples=samples)

    right: dict[BlockKey, list[int]] = {}
    for worker in cluster.workers:
        cluster.finish(worker)
        worker.assert_empty()
        worker.sink.copy_all()
        for seq_id, prompt in worker.prompts.items():
            drawn, is_over = worker.drawn[seq_id], (worker, seq_id) in cluster.over
            for sample, tokens in drawn.items():
                assert tokens == expected(prompt.tokens, len(tokens), sample)
                right |= contents((*prompt.tokens, *tokens))
            if not is_over and seq_id not in worker.exported:
                lengths = [len(drawn[sample]) for sample in prompt.samples]
                assert lengths == [prompt.sampling.max_tokens] * len(prompt.samples)
            right |= contents(prompt.tokens)
    assert all(held == right[key] for key, held in cluster.pool.blocks.items())

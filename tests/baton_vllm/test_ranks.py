"""What a worker and its ranks tell each other, over real sockets; the ranks' ends are in this process, too."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from baton.errors import ConfigError, InvariantError, OutOfMemoryError
from baton.ids import BlockId, LayerName, SeqId
from baton.layout import KvLayout
from baton_engine.messages import PrefillStarted, Released
from baton_engine.ports import LayerReady
from baton_vllm.hand_offs import VllmHandOffs
from baton_vllm.ranks import RankEnds, RankLink, WorkerRanks
from kv_transfer.memory.arena import WorkerMemory

TIMEOUT_S = 10.0
A = SeqId("a")
LAYOUT = KvLayout(
    model_fingerprint="model=0123",
    dtype="float32",
    block_tokens=4,
    num_kv_heads=2,
    head_dim=8,
    layers=(LayerName("one"), LayerName("two")),
)


class Sink:
    def __init__(self) -> None:
        self.told: list[LayerReady] = []
        self._came = threading.Condition()

    def save_kv_layer(self, layer: LayerReady) -> None:
        with self._came:
            self.told.append(layer)
            self._came.notify_all()

    def until(self, count: int) -> list[LayerReady]:
        with self._came:
            assert self._came.wait_for(lambda: len(self.told) >= count, TIMEOUT_S)
        return self.told


class Rig:
    """A worker of two ranks. Each rank has the ends as its process would have them."""

    def __init__(self) -> None:
        self.sink = Sink()
        self.memories = [WorkerMemory(), WorkerMemory()]
        self.hand_offs = VllmHandOffs()
        self.hand_offs.use_blocks_of(LAYOUT.block_tokens)
        self.ranks = WorkerRanks(self.memories, self.hand_offs, self.sink)
        _, (ends,) = self.ranks.__reduce__()
        self.links: list[RankLink] = []
        for rank in (0, 1):
            own = [end.dup() for end in ends]
            self.links.append(RankEnds(own).take(rank))
        self.lost = threading.Event()
        self.ranks.spawned(self.lost.set)

    def tell_pages(self, *layouts: KvLayout) -> None:
        for link, layout in zip(self.links, layouts, strict=True):
            link.tell_pages(layout, 9)

    def compute(self, num_tokens: int) -> None:
        """A prompt of `num_tokens` is decided to be computed in one step."""
        self.hand_offs.prefill(A, num_tokens)
        self.hand_offs.scheduled(A, [(5, 3)], start=0, num_tokens=num_tokens, anew=True)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    for link in made.links:
        link._end.close()
    made.ranks._thread.join(TIMEOUT_S)
    assert not made.ranks._thread.is_alive(), "it ends with its ranks"
    for memory in made.memories:
        if memory._region is not None:
            memory.region.close()


def test_a_ranks_cache_lies_in_the_workers_memory(rig: Rig) -> None:
    for number, link in enumerate(rig.links):
        bytes_of_rank = link.allocate(8192)
        assert (bytes_of_rank.size_bytes, bytes_of_rank.device) == (8192, None)
        assert bytes_of_rank.view is not None
        bytes_of_rank.view[100] = 7 + number

    assert [memory.span.host_view[100] for memory in rig.memories] == [7, 8]


def test_a_rank_is_told_why_there_is_no_memory(rig: Rig) -> None:
    with pytest.raises(OutOfMemoryError, match="were asked for"):
        rig.links[1].allocate(1 << 60)


def test_a_rank_that_ends_is_told_of(rig: Rig) -> None:
    assert not rig.lost.is_set()
    rig.links[0]._end.close()
    assert rig.lost.wait(TIMEOUT_S)


def test_whole_pages_are_the_slices_of_all_ranks(rig: Rig) -> None:
    rig.tell_pages(LAYOUT, LAYOUT)

    layouts = rig.ranks.layouts(4)

    assert [layout.tp_rank for layout in layouts] == [0, 1]
    assert {layout.whole for layout in layouts} == {replace(LAYOUT, num_kv_heads=4)}
    assert rig.ranks.num_pages == 9
    assert rig.ranks.fingerprint == LAYOUT.model_fingerprint


def test_heads_that_several_ranks_hold_are_not_handed_off(rig: Rig) -> None:
    rig.tell_pages(*[replace(LAYOUT, num_kv_heads=1)] * 2)

    with pytest.raises(ConfigError, match="2 ranks hold 1 KV heads more than once"):
        rig.ranks.layouts(1)


def test_ranks_that_differ_are_not_handed_off(rig: Rig) -> None:
    rig.tell_pages(LAYOUT, replace(LAYOUT, head_dim=16))

    with pytest.raises(ConfigError, match="not laid out alike"):
        rig.ranks.layouts(4)


def test_a_ranks_misfit_is_the_workers(rig: Rig) -> None:
    rig.links[1].tell_misfit("pages of another shape", "model=0123")

    with pytest.raises(ConfigError, match="pages of another shape"):
        rig.ranks.layouts(4)
    assert rig.ranks.fingerprint == "model=0123"


def test_a_rank_that_tells_nothing_is_a_fault(rig: Rig) -> None:
    rig.links[0].tell_pages(LAYOUT, 9)

    with pytest.raises(InvariantError, match="did not tell"):
        rig.ranks.layouts(4, timeout_s=0.05)


def test_a_layer_is_told_once_every_rank_has_computed_it_and_of_its_own_step(rig: Rig) -> None:
    rig.tell_pages(LAYOUT, LAYOUT)
    rig.ranks.layouts(4)
    rig.compute(8)
    step, _, _ = rig.ranks.begin_step()
    rig.ranks.end_step()  # what a rank has sent may be read when the step is over

    rig.links[0].layer_computed(step, 0)
    rig.links[0].layer_computed(step, 1)
    rig.links[1].layer_computed(step, 0)
    rig.links[1].layer_computed(step, 1)

    told = rig.sink.until(2)
    assert [layer.layer_index for layer in told] == [0, 1]
    for layer in told:
        (export,) = layer.exports
        assert (export.seq_id, export.blocks) == (A, (BlockId(5), BlockId(3)))
    assert not rig.ranks._steps


def test_ranks_need_not_tell_of_a_step_that_completes_no_page(rig: Rig) -> None:
    assert rig.ranks.begin_step() == (0, frozenset(), frozenset())


def test_what_ranks_are_to_name_to_vllm_is_gone_once_the_step_is_over(rig: Rig) -> None:
    rig.compute(8)
    rig.ranks.begin_step()
    rig.ranks.end_step()
    assert rig.hand_offs.finished(A, complete=True)
    rig.hand_offs.end(A)

    rig.ranks.end_step()  # vLLM had nothing to do, and decided no step: nothing was named
    assert A in rig.hand_offs
    _, sent, received = rig.ranks.begin_step()
    assert (sent, received) == (frozenset({A}), frozenset())
    assert [type(event) for event in rig.hand_offs.take_events()] == [PrefillStarted]
    rig.ranks.end_step()

    assert rig.hand_offs.take_events() == [Released(seq_id=A)]

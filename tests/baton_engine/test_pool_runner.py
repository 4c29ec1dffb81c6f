"""A real model over a real slab: tokens are those computed without a pool, and layers are used as they come."""

import threading
from collections.abc import Callable, Sequence
from itertools import count, takewhile
from pathlib import Path

import pytest
import torch

from baton.clock import ManualClock
from baton.errors import CorruptKvError
from baton.generation import Prompt, SamplingParams
from baton.hashing import chain_keys, root_key
from baton.ids import BlockKey, SeqId
from baton_engine.cache.arena import KvArena
from baton_engine.loop import EngineLoop
from baton_engine.messages import Failed, Generate, Prefill, PrefillStarted
from baton_engine.models.config import kv_layout, load_spec
from baton_engine.models.loader import load_decoder
from baton_engine.ports import LayerReady
from baton_engine.runner import ModelRunner
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.scheduling.scheduler import Scheduler
from kvpool.client.arena_pages import HostPages, slab_layers
from kvpool.client.publisher import Placed, PoolWriter, PublishQueue
from kvpool.client.read_leases import ReadLeases
from kvpool.client.reader import PoolReader
from kvpool.messages import BlockLease, HeldBlock
from tests.baton_engine.sampled import Event, Sampled, all_events
from tests.baton_engine.tiny_models import make_model, random_prompts
from tests.kvpool.client.arena_world import Desk, Gated

A, B = SeqId("test/a"), SeqId("test/b")
NUM_BLOCKS, BLOCK_TOKENS, NUM_SLOTS, NUM_LAYERS = 40, 8, 64, 3
TIMEOUT_S = 30


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("pooled"), "llama", num_layers=NUM_LAYERS)


class Sink:
    """Remembers which layers of which sequence were ready; `told` is called for each."""

    def __init__(self) -> None:
        self.layers: dict[SeqId, list[int]] = {}
        self.told: Callable[[int], None] = lambda layer_index: None

    def save_kv_layer(self, layer: LayerReady) -> None:
        for export in layer.exports:
            self.layers.setdefault(export.seq_id, []).append(layer.layer_index)
        self.told(layer.layer_index)


class Slab:
    """A node's memory without the node."""

    def __init__(self, layout) -> None:
        self.memory = memoryview(bytearray(NUM_SLOTS * layout.page_bytes))
        self.rows = slab_layers(
            self.memory, layout, num_slots=NUM_SLOTS, slot_bytes=layout.page_bytes
        )
        self.held: dict[BlockKey, HeldBlock] = {}
        self._slots = count()

    def put(self, queue: PublishQueue, writer: PoolWriter) -> None:
        """Takes everything that waits in `queue`."""
        while pages := queue.take(16):
            places = [Placed(page=page, slot=next(self._slots)) for page in pages]
            for placed, sums in zip(places, writer.write(places, self.rows), strict=True):
                key = placed.page.key
                if sums:
                    self.held[key] = HeldBlock(key=key, slot=placed.slot, epoch=1, checksums=sums)


class Granting(Desk):
    """Grants at once what is wanted again."""

    def __init__(self, engine: "Pooled") -> None:
        super().__init__()
        self._engine = engine

    def wanted(self, seq_id, keys) -> None:
        super().wanted(seq_id, keys)
        self._engine.lease(seq_id, keys, wanted=True)


class Pooled:
    """An engine on the caller's thread, connected to a slab; leases whatever the slab holds for every sequence."""

    def __init__(self, checkpoint: Path, *, slab: Slab | None = None, gated: bool = False) -> None:
        spec = load_spec(checkpoint)
        decoder = load_decoder(checkpoint, spec, torch.float32, torch.device("cpu"))
        layout = kv_layout(spec, torch.float32, BLOCK_TOKENS)
        memory = memoryview(bytearray(layout.region_bytes(NUM_BLOCKS)))
        limits = EngineLimits(
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_model_len=256,
            block_tokens=BLOCK_TOKENS,
            num_blocks=NUM_BLOCKS,
            vocab_size=spec.vocab_size,
        )
        self.layout = layout
        self.slab = slab or Slab(layout)
        self.sink, self.desk, self.events = Sink(), Granting(self), list[Event]()
        clock = ManualClock()
        host = HostPages(memory, layout, num_blocks=NUM_BLOCKS)
        self.arena = Gated(host, is_open=not gated)
        self.leases = ReadLeases(clock, self.desk.released)
        self.reader = PoolReader(
            self.arena, self.leases, self.desk, clock, stalled_after_s=TIMEOUT_S
        )
        self.reader.connect(self.slab.rows)
        scheduler = Scheduler(limits, layout=layout, secret=bytes(32))
        self.queue = PublishQueue(256, wake=lambda: None)
        self.writer = PoolWriter(host, scheduler.generation)
        runner = ModelRunner(decoder, KvArena(layout, NUM_BLOCKS, memory), self.sink)
        self.loop = EngineLoop(
            scheduler, runner, emit=lambda told: self.events.extend(all_events(told)), clock=clock
        )
        self.loop.connect_pool(self.reader, self.queue)
        self.scheduler = scheduler

    def submit(self, command: Generate | Prefill) -> None:
        root = root_key(bytes(32), scope="", layout=self.layout)
        keys = chain_keys(bytes(32), root, command.prompt.tokens, BLOCK_TOKENS)
        self.lease(command.seq_id, keys)
        self.loop.submit(command)

    def lease(self, seq_id: SeqId, keys: Sequence[BlockKey], *, wanted: bool = False) -> None:
        held = takewhile(lambda block: block is not None, map(self.slab.held.get, keys))
        blocks = tuple(block for block in held if block is not None)
        if not blocks:
            return
        lease = BlockLease(lease_id=seq_id, blocks=blocks, lease_s=60)
        self.leases.add(seq_id, lease, asked_s=0.0, wanted=wanted)

    def run(self) -> None:
        while self.loop.turn():
            self.scheduler.check_integrity()
            self.slab.put(self.queue, self.writer)

    def tokens(self, seq_id: SeqId) -> list[int]:
        drawn = [e for e in self.events if isinstance(e, Sampled) and e.seq_id == seq_id]
        return [token.token for event in drawn for token in event.tokens]

    def pooled(self, seq_id: SeqId) -> list[int]:
        started = [e for e in self.events if isinstance(e, PrefillStarted)]
        return [event.pooled_tokens for event in started if event.seq_id == seq_id]


def asking(tokens: list[int], max_tokens: int = 12) -> Prompt:
    return Prompt(
        prompt_tokens=tuple(tokens),
        sampling=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
    )


@pytest.fixture
def closing():
    """Ends the readers' threads."""
    engines: list[Pooled] = []

    def keep(engine: Pooled) -> Pooled:
        engines.append(engine)
        return engine

    yield keep
    for engine in engines:
        engine.arena.open()
        engine.reader.close()


def text(seed: int, length: int = 100) -> list[int]:
    (tokens,) = [prompt for prompt in random_prompts(8, length, seed=seed) if len(prompt) > 60][:1]
    return tokens


def test_tokens_are_those_computed_without_a_pool(checkpoint, closing):
    first = closing(Pooled(checkpoint))
    asked = asking(text(1))
    first.submit(Generate(seq_id=A, prompt=asked))
    first.run()
    second = closing(Pooled(checkpoint, slab=first.slab))
    second.submit(Generate(seq_id=A, prompt=asked))
    second.run()
    assert first.pooled(A) == [0]
    assert second.pooled(A) == [(len(asked.prompt_tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS]
    assert second.tokens(A) == first.tokens(A)
    assert second.desk.bad == []
    assert second.desk.let_go == [A]


def test_a_conversation_goes_on_from_what_was_generated(checkpoint, closing):
    first = closing(Pooled(checkpoint))
    first.submit(Generate(seq_id=A, prompt=asking(text(2), 30)))
    first.run()
    longer = asking([*text(2), *first.tokens(A), 5, 6, 7])
    second = closing(Pooled(checkpoint, slab=first.slab))
    alone = closing(Pooled(checkpoint))
    for engine in (second, alone):
        engine.submit(Generate(seq_id=B, prompt=longer))
        engine.run()
    assert second.pooled(B)[0] > len(text(2))
    assert second.tokens(B) == alone.tokens(B)


def test_a_layer_is_computed_while_the_next_has_not_come_yet(checkpoint, closing):
    """Each layer's bytes are let through only once the layer before has been computed: whoever waited for all would
    wait for ever, and whoever read too early would read zeros.
    """
    first = closing(Pooled(checkpoint))
    asked = asking(text(3))
    first.submit(Generate(seq_id=A, prompt=asked))
    first.run()
    second = closing(Pooled(checkpoint, slab=first.slab, gated=True))
    gates = [*second.arena.gates, threading.Event()]
    gates[0].set()
    second.sink.told = lambda layer_index: gates[layer_index + 1].set()
    second.submit(Prefill(seq_id=A, prompt=asked))
    second.run()
    assert second.sink.layers[A] == list(range(NUM_LAYERS))
    assert second.pooled(A)[0] > 0
    assert second.tokens(A) == first.tokens(A)[:1]


def test_a_corrupt_layer_is_never_pushed_drawn_from_or_published(checkpoint, closing):
    first = closing(Pooled(checkpoint))
    asked, beside = asking(text(4)), asking([9, 8, 7, 6, 5] * 3)
    for seq_id, prompt in ((A, asked), (B, beside)):
        first.submit(Generate(seq_id=seq_id, prompt=prompt))
        first.run()
    slab = first.slab
    wrong = list(slab.held.values())[2]
    slab.rows[1][wrong.slot, 33] ^= 4
    second = closing(Pooled(checkpoint, slab=slab, gated=True))
    gates = [*second.arena.gates, threading.Event()]
    gates[0].set()
    second.sink.told = lambda layer_index: gates[layer_index + 1].set()
    second.submit(Prefill(seq_id=A, prompt=asked))
    second.submit(Prefill(seq_id=B, prompt=beside))
    second.run()
    (failed,) = [event for event in second.events if isinstance(event, Failed)]
    assert failed.seq_id == A
    assert isinstance(failed.error, CorruptKvError)
    assert second.sink.layers == {A: [0], B: list(range(NUM_LAYERS))}
    assert second.tokens(A) == []
    assert second.tokens(B) == first.tokens(B)[:1]
    assert second.desk.bad == [wrong.key]
    assert len(second.queue) == 0
    load = second.scheduler.load()
    assert load.blocks_used + load.blocks_cached == 2


def test_pages_that_were_preempted_come_back_from_the_pool(checkpoint, closing):
    crowded, roomy = closing(Pooled(checkpoint)), closing(Pooled(checkpoint))
    prompts = {SeqId(f"test/{n}"): asking(text(10 + n)[:70], 60) for n in range(3)}
    for seq_id, prompt in prompts.items():
        crowded.submit(Generate(seq_id=seq_id, prompt=prompt))
        roomy.loop.submit(Generate(seq_id=seq_id, prompt=prompt))
        roomy.run()
    crowded.run()
    assert crowded.scheduler.load().preemptions > 0
    assert any(sum(crowded.pooled(seq_id)) for seq_id in prompts)
    for seq_id in prompts:
        assert crowded.tokens(seq_id) == roomy.tokens(seq_id)

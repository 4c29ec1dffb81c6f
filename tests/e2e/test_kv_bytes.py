"""KV of a real model on both sides of a hand-off, byte for byte, and what the receiver makes of it."""

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from baton.config.schema import EngineConfig, ModelConfig
from baton.errors import TransferError
from baton.generation import Prompt, SamplingParams
from baton.ids import BlockId, SeqId, new_xfer_id
from baton.layout import SPARE_BLOCKS
from baton.pages import PageWrite
from baton_engine.build import BuiltEngine, build_engine
from baton_engine.messages import Generate, Prefill, Receive, Reserved, Start, StepEvents
from baton_engine.ports import LayerReady, LayerSink
from kv_transfer.backends.shm import ShmReceiver, ShmSender
from kv_transfer.memory.arena import WorkerMemory
from kv_transfer.ports import KvWriter
from tests.baton_engine.sampled import Event, Sampled, all_events
from tests.baton_engine.tiny_models import make_model, random_prompts
from tests.e2e.reference import Reference

SEQ = SeqId("test/1")


@dataclass(kw_only=True)
class Engine:
    """A real engine in shared memory, and what it says."""

    built: BuiltEngine
    arena: WorkerMemory
    told: queue.Queue[StepEvents] = field(default_factory=queue.Queue)

    @property
    def region_blocks(self) -> int:
        return self.built.limits.num_blocks + SPARE_BLOCKS

    def events(self) -> Iterator[Event]:
        while True:
            yield from all_events(self.told.get(timeout=20))

    def text(self, begun: Sequence[int] = ()) -> list[int]:
        """All tokens of the one sequence that runs."""
        text = list(begun)
        drawn = (event for event in self.events() if isinstance(event, Sampled))
        while len(text) < GREEDY.max_tokens:
            text += [sample.token for sample in next(drawn).tokens]
        return text

    def page(self, layer: int, block: BlockId) -> bytes:
        layout, num_blocks = self.built.layout, self.region_blocks
        size = layout.page_layer_bytes
        start = layout.layer_offset(layer, num_blocks) + block * size
        return bytes(self.arena.region.memoryview[start : start + size])


def start_engine(checkpoint: Path, sink: LayerSink | None = None, kv_dtype: str = "auto") -> Engine:
    arena = WorkerMemory()
    built = build_engine(
        ModelConfig(model=str(checkpoint), dtype="float32"),
        EngineConfig(
            kv_cache_memory_bytes=4 << 20,
            kv_cache_dtype=kv_dtype,
            max_num_batched_tokens=48,
            num_threads=1,
        ),
        secret=bytes(32),
        memory=arena,
        sink=sink,
        progress=lambda what, done: None,
    )
    engine = Engine(built=built, arena=arena)
    built.host.attach(engine.told.put)
    built.host.start()
    return engine


class PushingSink:
    """Writes every exported page into the pages granted for it, layer by layer, while the prompt is computed."""

    def __init__(self) -> None:
        self.writer: KvWriter | None = None
        self.granted: tuple[BlockId, ...] = ()
        self.pushed: set[tuple[int, BlockId, BlockId]] = set()
        self.failures: list[TransferError] = []
        self._outstanding = threading.Semaphore(0)
        self._num_pushes = 0

    def save_kv_layer(self, layer: LayerReady) -> None:
        assert self.writer is not None
        layer_index = layer.layer_index
        for export in layer.exports:
            end = export.first_block + len(export.blocks)
            target = self.granted[export.first_block : end]
            pairs = zip(export.blocks, target, strict=True)
            self.pushed |= {(layer_index, source, page) for source, page in pairs}
            self._num_pushes += 1
            self.writer.push(
                PageWrite(
                    xfer_id=new_xfer_id(),
                    layer_index=layer_index,
                    source=export.blocks,
                    target=target,
                ),
                self._done,
            )

    def _done(self, failure: TransferError | None) -> None:
        if failure is not None:
            self.failures.append(failure)
        self._outstanding.release()

    def until_written(self) -> None:
        for _ in range(self._num_pushes):
            assert self._outstanding.acquire(timeout=20)


GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TOKENS = random_prompts(2, 333)[1]


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_kv_arrives_bit_equal_and_decodes_to_the_models_own_text(
    family: str, tmp_path: Path
) -> None:
    checkpoint = make_model(tmp_path / "model", family)
    Reference(checkpoint).assert_greedy(TOKENS, handed_off(checkpoint, tmp_path))


def test_pages_of_8_bits_decode_to_what_one_engine_alone_decodes(tmp_path: Path) -> None:
    checkpoint = make_model(tmp_path / "model", "qwen2")
    alone = start_engine(checkpoint, kv_dtype="fp8_e4m3")
    alone.built.host.submit(
        Generate(seq_id=SEQ, prompt=Prompt(prompt_tokens=tuple(TOKENS), sampling=GREEDY))
    )
    text = alone.text()
    alone.built.host.close()
    assert handed_off(checkpoint, tmp_path, kv_dtype="fp8_e4m3") == text


def handed_off(checkpoint: Path, tmp_path: Path, kv_dtype: str = "auto") -> list[int]:
    """What one engine decodes from the pages that another one filled, which are compared byte for byte."""
    prompt = Prompt(prompt_tokens=tuple(TOKENS), sampling=GREEDY)
    sink = PushingSink()
    p, d = start_engine(checkpoint, sink, kv_dtype), start_engine(checkpoint, kv_dtype=kv_dtype)
    receiver = ShmReceiver(
        d.arena.region, path=str(tmp_path / "kv.sock"), num_blocks=d.region_blocks
    )
    sender = ShmSender(p.arena.region.memoryview, num_blocks=p.region_blocks)

    d.built.host.submit(Receive(seq_id=SEQ, prompt=prompt))
    reserved = next(event for event in d.events() if isinstance(event, Reserved))
    assert len(reserved.blocks) == -(-333 // 16)
    sink.granted = reserved.blocks
    sink.writer = sender.connect(receiver.handle(), p.built.layout)
    p.built.host.submit(Prefill(seq_id=SEQ, prompt=prompt))
    first = next(event for event in p.events() if isinstance(event, Sampled)).tokens
    sink.until_written()

    assert sink.failures == []
    layers = range(len(p.built.layout.layers))
    assert {(layer, page) for layer, _, page in sink.pushed} == {
        (layer, page) for layer in layers for page in reserved.blocks
    }
    for layer, source, target in sink.pushed:
        assert any(p.page(layer, source)), "nothing was computed"
        assert p.page(layer, source) == d.page(layer, target)

    d.built.host.submit(Start(seq_id=SEQ, first_tokens=first))
    text = d.text([first[0].token])

    sink.writer.close()
    receiver.close()
    for engine in (p, d):
        engine.built.host.close()
    return text

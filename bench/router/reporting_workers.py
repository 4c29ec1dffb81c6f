"""Workers that report the blocks they hold, and the long texts these are of: what `bench.route` fills an index with."""

import json
from collections.abc import Iterator
from random import Random

import numpy as np

from baton.blocks import BlockReport, joined
from baton.generation import WorkerLoad
from baton.hashing import KEY_BYTES, chain_keys, root_key
from baton.ids import BlockKey, Incarnation, LayerName, Role, WorkerId, WorkerIdentity
from baton.layout import KvLayout
from baton.rpc.block_feed import MAX_KEYS_PER_REPORT
from baton.rpc.hello import WorkerHello
from baton.rpc.reports import blocks_to_proto, load_to_proto
from baton.rpc.v1 import worker_pb2
from baton.tokens import PackedTokens
from router.ports import ServedModel

SECRET = bytes(32)
MODEL = ServedModel(max_model_len=131_072, max_samples=256, vocab_size=128_256)
_LAYOUT = KvLayout(
    model_fingerprint="bench",
    dtype="bfloat16",
    block_tokens=64,
    num_kv_heads=8,
    head_dim=128,
    layers=tuple(LayerName(f"model.layers.{number}") for number in range(32)),
)
_MAX_TOKENS = 256
_KEYS_PER_REPORT = 8
"""What a busy worker stores and evicts between two frames to its routers."""

_HOLDERS_PER_TEXT = 4
"""Workers that hold some part of each text."""


class ReportingWorker:
    """Reports as workers do, in frames as they cross the wire."""

    def __init__(self, number: int, role: Role) -> None:
        identity = WorkerIdentity(
            worker_id=WorkerId(f"{role.value}-{number}"), incarnation=Incarnation(1)
        )
        self.hello = WorkerHello(
            identity=identity,
            role=role,
            layout=_LAYOUT,
            max_model_len=MODEL.max_model_len,
            vocab_size=MODEL.vocab_size,
            num_blocks=20_000,
            max_num_seqs=256,
            transfer_address=f"10.0.0.{number}:7000" if role.decodes else "",
        )
        self.texts: list[list[BlockKey]] = []
        self._seq = 0

    def snapshot(self) -> Iterator[bytes]:
        """Frames with all that it holds."""
        keys = joined(key for text in self.texts for key in text)
        step = MAX_KEYS_PER_REPORT * KEY_BYTES
        starts = range(0, len(keys), step)
        for start in starts:
            yield self._frame(
                stored=keys[start : start + step],
                snapshot=True,
                first=start == 0,
                last=start == starts[-1],
            )

    def change(self, rng: Random) -> bytes:
        """A frame with the end of one text evicted, and as many new blocks stored."""
        text = rng.choice(self.texts)
        gone = text[-_KEYS_PER_REPORT // 2 :]
        new = [BlockKey(rng.randbytes(KEY_BYTES)) for _ in gone]
        text[-len(gone) :] = new
        return self._frame(stored=joined(new), removed=joined(reversed(gone)))

    def step(self, rng: Random) -> bytes:
        """A frame with a load report after a step that only decoded."""
        running = rng.randrange(1, 64)
        return _load_frame(
            WorkerLoad(
                steps=1,
                step_s=0.01 + 1e-4 * running,
                step_sequences=running,
                step_context_tokens=1000 * running,
                running=running,
                blocks_total=self.hello.num_blocks,
            )
        )

    def draining(self) -> bytes:
        """A frame with a load report that says it takes nothing new."""
        return _load_frame(WorkerLoad(draining=True, blocks_total=self.hello.num_blocks))

    def _frame(self, **fields: bytes | bool) -> bytes:
        self._seq += 1
        blocks = blocks_to_proto(BlockReport(seq=self._seq, **fields))  # type: ignore[arg-type]
        return worker_pb2.Frame(blocks=blocks).SerializeToString()


def _load_frame(load: WorkerLoad) -> bytes:
    return worker_pb2.Frame(load=load_to_proto(load)).SerializeToString()


class LongTexts:
    """Long texts that the workers hold parts of, and prompts that go on from them."""

    def __init__(self, count: int, tokens: int, rng: np.random.Generator) -> None:
        self._rng = rng
        self.tokens = [self._draw(tokens) for _ in range(count)]
        root = root_key(SECRET, scope="", layout=_LAYOUT)
        self.keys = [
            chain_keys(
                SECRET, root, PackedTokens(text.astype("<u4").tobytes()), _LAYOUT.block_tokens
            )
            for text in self.tokens
        ]

    def prompt(self) -> bytes:
        """A request's body: a text's beginning, of any length, and something new."""
        text = self.tokens[self._rng.integers(len(self.tokens))]
        shared = int(self._rng.integers(1, len(text)))
        prompt = np.concatenate([text[:shared], self._draw(len(text) - shared)])
        body = {"model": "bench", "prompt": prompt.tolist(), "max_tokens": _MAX_TOKENS}
        return json.dumps(body).encode()

    def _draw(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return self._rng.integers(0, MODEL.vocab_size, count)


def give_out(workers: list[ReportingWorker], texts: LongTexts, blocks: int, rng: Random) -> None:
    """Gives out `blocks` distinct ones: to four workers, or all, each of the texts, in part,
    and the rest to one worker each.
    """
    for keys in texts.keys:
        first, *others = rng.sample(workers, min(_HOLDERS_PER_TEXT, len(workers)))
        first.texts.append(list(keys))
        for worker in others:
            worker.texts.append(keys[: rng.randrange(1, len(keys))])
    length = len(texts.keys[0])
    left = blocks - length * len(texts.keys)
    while left > 0:
        text = [BlockKey(rng.randbytes(KEY_BYTES)) for _ in range(min(length, left))]
        rng.choice(workers).texts.append(text)
        left -= len(text)

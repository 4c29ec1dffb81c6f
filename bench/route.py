"""What a decision and a whole request cost one router: `python -m bench.route [--json FILE]`.

100 workers report a million blocks; then prompts of 100,000 token ids arrive, each going on from a text that some workers
hold some part of, while workers keep reporting what they store and evict. All of it goes through the router's own classes on
one thread, as in its event loop. Times are CPU time: whatever else runs on this machine takes no part in them, beyond
the caches that it empties.

A decision (`decision_*`) finds who holds how much of the prompt, prices the workers, looks whether the chosen one has
room, and remembers the choice. A request (`request_cpu_ms`) is all of the router's work from the body's bytes to both
commands' bytes: checking, hashing, the decision, the permit. `index_bytes_per_block` is what the index's table takes,
`index_rss_bytes_per_block` what the process grew by while it was filled.

With `--pool-nodes` as many nodes of the pool hold every text whole, and each worker maps one of them.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from random import Random
from statistics import quantiles
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import psutil
import tokenizers
from prometheus_client import CollectorRegistry

from baton.blocks import BlockReport, joined
from baton.clock import MonotonicClock
from baton.config.schema import RouterConfig
from baton.generation import WorkerLoad
from baton.hashing import KEY_BYTES, chain_keys, root_key
from baton.ids import BlockKey, Incarnation, LayerName, RequestId, Role, WorkerId, WorkerIdentity
from baton.layout import KvLayout
from baton.rpc.block_feed import MAX_KEYS_PER_REPORT
from baton.rpc.hello import WorkerHello
from baton.rpc.reports import blocks_to_proto
from baton.rpc.v1 import decode_pb2, prefill_pb2
from baton.tokens import PackedTokens
from bench.report import Report
from router.admission.pace import LearnedPace
from router.admission.room import WorkerRoom
from router.dispatch import Dispatcher
from router.events import (
    ClientGone,
    Heard,
    LoadReported,
    SendAction,
    SendExpect,
    SendGenerate,
    SendPrefill,
    StepTokens,
    Submitted,
    WorkerJoined,
)
from router.fake import FakeGenerator
from router.frames import decode_command, decode_events, prefill_command, prefill_events
from router.limits.local import LocalLimiter
from router.limits.ports import GrantId
from router.metrics import RouterMetrics
from router.openai.completions import read_completion
from router.openai.order import Order, ReplyHead
from router.openai.plan import Wanted, plan_runs
from router.openai.sampling import SamplingDefaults, completion_limit
from router.openai.serving import Serving
from router.openai.visit import Visit
from router.placement import Placement
from router.ports import GenerationJob, ServedModel
from router.restarts import Patience
from router.routing.index import PrefixIndex
from router.routing.policies import policy_named
from router.routing.view import ClusterView
from router.slo import SloBook
from router.tenants.tenant import ANONYMOUS, Caller
from router.tokenizer import Tokenizer

_Result = TypeVar("_Result")
_SECRET = bytes(32)
_LAYOUT = KvLayout(
    model_fingerprint="bench",
    dtype="bfloat16",
    block_tokens=64,
    num_kv_heads=8,
    head_dim=128,
    layers=tuple(LayerName(f"model.layers.{number}") for number in range(32)),
)
_MODEL = ServedModel(max_model_len=131_072, vocab_size=128_256)
_MAX_TOKENS = 256
_KEYS_PER_REPORT = 8
"""What a busy worker stores and evicts between two frames to its routers."""


class _Measured(Placement):
    """Takes the time of every decision; hashing, which comes before it, apart."""

    decisions_s: list[float]

    def choose(self, job, prompt, avoid, now_s):  # type: ignore[no-untyped-def]
        """See Placement."""
        for worker in self._view.workers:
            self._chain(job, worker.layout_group, worker.hello.layout)
            break
        begun_s = time.thread_time()
        chosen = super().choose(job, prompt, avoid, now_s)
        self.decisions_s.append(time.thread_time() - begun_s)
        return chosen


class _Worker:
    """Reports as workers do, in frames as they cross the wire."""

    def __init__(self, number: int, role: Role) -> None:
        identity = WorkerIdentity(
            worker_id=WorkerId(f"{role.value}-{number}"), incarnation=Incarnation(1)
        )
        self.hello = WorkerHello(
            identity=identity,
            role=role,
            layout=_LAYOUT,
            max_model_len=_MODEL.max_model_len,
            vocab_size=_MODEL.vocab_size,
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

    def _frame(self, **fields: bytes | bool) -> bytes:
        self._seq += 1
        blocks = blocks_to_proto(BlockReport(seq=self._seq, **fields))  # type: ignore[arg-type]
        if self.hello.role.decodes:
            return decode_pb2.DecodeFrame(blocks=blocks).SerializeToString()
        return prefill_pb2.PrefillFrame(blocks=blocks).SerializeToString()


class _Router:
    """The router's core with its edges, as far as a request and a report go through it."""

    def __init__(self, policy: str) -> None:
        self.index = PrefixIndex()
        view = ClusterView(self.index, silence_timeout_s=float("inf"))
        self._pools = view.pools
        config = RouterConfig()
        window_tokens = config.prefill_window_tokens
        self.placement = _Measured(
            view=view,
            index=self.index,
            policy=policy_named(policy),
            secret=_SECRET,
            rng=Random(0),
            room=WorkerRoom(view, LearnedPace(), prefill_window_tokens=window_tokens),
        )
        self.placement.decisions_s = []
        self.dispatcher = Dispatcher(view=view, placement=self.placement, patience=Patience())
        self._serving = Serving(
            model_names=("bench",),
            created_s=0,
            generator=FakeGenerator(),
            tokenizer=_tokenizer(),
            defaults=SamplingDefaults(),
            metrics=RouterMetrics(CollectorRegistry(), "bench"),
            max_body_bytes=config.max_body_bytes,
            request_timeout_s=config.request_timeout_s,
            slo_book=SloBook(config.slo_classes),
        )
        self._visit = Visit(
            caller=Caller(tenant=ANONYMOUS),
            name="bench",
            limiter=LocalLimiter(MonotonicClock()),
            grant=GrantId("bench"),
        )

    def join(self, worker: _Worker) -> None:
        """A worker is connected."""
        joined_ = WorkerJoined(hello=worker.hello, address=worker.hello.identity.worker_id)
        self.dispatcher.handle(joined_, 0.0)

    def watch(
        self, number: int, workers: Sequence[_Worker], texts: Sequence[Sequence[BlockKey]]
    ) -> None:
        """A node of the pool that holds `texts`, and that `workers` map."""
        node = WorkerIdentity(worker_id=WorkerId("pool-0"), incarnation=Incarnation(number))
        self._pools.join(node, f"10.0.1.{number}:7000")
        for seq, text in enumerate(texts, 1):
            whole = seq == 1
            report = BlockReport(
                seq=seq, stored=joined(text), snapshot=whole, first=whole, last=whole
            )
            self._pools.report_blocks(node, report)
        load = WorkerLoad(pool_node=node.worker_id, pool_incarnation=node.incarnation)
        for worker in workers:
            heard = LoadReported(worker=worker.hello.identity, load=load)
            self.dispatcher.handle(heard, time.monotonic())

    def hear(self, worker: _Worker, frame: bytes) -> None:
        """A worker's frame came."""
        identity = worker.hello.identity
        events: Sequence[Heard]
        if worker.hello.role.decodes:
            events = decode_events(identity, decode_pb2.DecodeFrame.FromString(frame))
        else:
            events = prefill_events(identity, prefill_pb2.PrefillFrame.FromString(frame))
        for event in events:
            if isinstance(event, StepTokens):
                raise RuntimeError("nothing is generated here")
            actions = self.dispatcher.handle(event, time.monotonic())
            if actions:
                raise RuntimeError(f"the index wants {actions}")

    def read(self, raw: bytes, request_id: RequestId) -> GenerationJob:
        """A request's body came."""
        body = read_completion(raw)
        wanted = Wanted(limit=completion_limit(body), samples=body.num_samples)
        order = Order(
            serving=self._serving,
            visit=self._visit,
            head=ReplyHead(request_id=request_id, created=0, model="bench"),
            model=_MODEL,
        )
        prompts = body.prompts
        (run,) = plan_runs(order, body, prompts, wanted)  # type: ignore[arg-type]  # token ids
        return run.job

    def begin(self, job: GenerationJob) -> list[bytes]:
        """The commands that begin a job, as bytes."""
        actions = self.dispatcher.handle(Submitted(job=job), time.monotonic())
        return [_command(action) for action in actions]  # type: ignore[arg-type]

    def end(self, job: GenerationJob) -> None:
        """Its client left."""
        self.dispatcher.handle(ClientGone(request_id=job.request_id), time.monotonic())


def _tokenizer() -> Tokenizer:
    """Any will do: prompts come as token ids. Not by `load`, which is slow."""
    file = resources.files("engine.demo") / "model" / "tokenizer.json"
    return Tokenizer(tokenizers.Tokenizer.from_file(str(file)), _NoChats())


class _NoChats:
    """A renderer that nobody asks."""

    chat_template = None
    special_tokens_map: Mapping[str, str] = MappingProxyType({})


def _command(action: SendAction) -> bytes:
    if isinstance(action, SendPrefill):
        return prefill_command(action).SerializeToString()
    if isinstance(action, SendExpect | SendGenerate):
        return decode_command(action).SerializeToString()
    raise RuntimeError(f"not how a request begins: {action}")


class _Texts:
    """Long texts that the workers hold parts of, and prompts that go on from them."""

    def __init__(self, count: int, tokens: int, rng: np.random.Generator) -> None:
        self._rng = rng
        self.tokens = [self._draw(tokens) for _ in range(count)]
        root = root_key(_SECRET, scope="", layout=_LAYOUT)
        self.keys = [
            chain_keys(
                _SECRET, root, PackedTokens(text.astype("<u4").tobytes()), _LAYOUT.block_tokens
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
        return self._rng.integers(0, _MODEL.vocab_size, count)


def _fill(workers: list[_Worker], texts: _Texts, blocks: int, rng: Random) -> None:
    """Gives out `blocks` distinct ones: to four workers each of the texts, in part, and the rest to one worker each."""
    for keys in texts.keys:
        first, *others = rng.sample(workers, 4)
        first.texts.append(list(keys))
        for worker in others:
            worker.texts.append(keys[: rng.randrange(1, len(keys))])
    length = len(texts.keys[0])
    left = blocks - length * len(texts.keys)
    while left > 0:
        text = [BlockKey(rng.randbytes(KEY_BYTES)) for _ in range(min(length, left))]
        rng.choice(workers).texts.append(text)
        left -= len(text)


@dataclass(slots=True, eq=False)
class _Times:
    """CPU seconds by what they were spent on."""

    spent_s: dict[str, list[float]] = field(default_factory=dict)

    def take(self, what: str, call: Callable[[], _Result]) -> _Result:
        """Does `call` and notes how long it took."""
        begun_s = time.thread_time()
        result = call()
        self.spent_s.setdefault(what, []).append(time.thread_time() - begun_s)
        return result


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """All figures."""
    rng = Random(0)
    router = _Router(arguments.policy)
    workers = [
        _Worker(number, Role.PREFILL if number < arguments.workers // 2 else Role.DECODE)
        for number in range(arguments.workers)
    ]
    texts = _Texts(arguments.texts, arguments.tokens, np.random.default_rng(0))
    _fill(workers, texts, arguments.blocks, rng)
    snapshots = [(worker, frame) for worker in workers for frame in worker.snapshot()]
    bodies = [texts.prompt() for _ in range(arguments.bodies)]
    figures = _load_index(router, workers, snapshots)
    nodes = arguments.pool_nodes
    for number in range(nodes):
        router.watch(1 + number, workers[number::nodes], texts.keys)
    figures |= _serve(router, workers, bodies, arguments, rng)
    router.index.check_integrity()
    return figures


def _load_index(
    router: _Router, workers: list[_Worker], snapshots: list[tuple[_Worker, bytes]]
) -> dict[str, float]:
    process, times = psutil.Process(), _Times()
    for worker in workers:
        router.join(worker)
    before = process.memory_info().rss
    for worker, frame in snapshots:
        times.take("snapshot", lambda w=worker, f=frame: router.hear(w, f))  # type: ignore[misc]
    grown, blocks = process.memory_info().rss - before, len(router.index)
    return {
        "indexed_blocks": blocks,
        "index_bytes_per_block": router.index.size_bytes / blocks,
        "index_rss_bytes_per_block": grown / blocks,
        "snapshot_us_per_block": 1e6 * sum(times.spent_s["snapshot"]) / router.index.counts.events,
    }


def _serve(
    router: _Router,
    workers: list[_Worker],
    bodies: list[bytes],
    arguments: argparse.Namespace,
    rng: Random,
) -> dict[str, float]:
    """Requests one after the other, and between them as many reports as are due."""
    times, before = _Times(), router.index.counts.events
    holders = [worker for worker in workers if worker.texts]
    begun_s = time.monotonic()
    for number in range(arguments.requests):
        while router.index.counts.events - before < arguments.events_per_s * (
            time.monotonic() - begun_s
        ):
            worker = rng.choice(holders)
            frame = worker.change(rng)
            times.take("report", lambda w=worker, f=frame: router.hear(w, f))  # type: ignore[misc]
        raw, request_id = bodies[number % len(bodies)], RequestId(f"cmpl-{number}")
        job = times.take("read", lambda r=raw, i=request_id: router.read(r, i))  # type: ignore[misc]
        times.take("begin", lambda j=job: router.begin(j))  # type: ignore[misc]
        router.end(job)
    elapsed_s = time.monotonic() - begun_s
    events = router.index.counts.events - before
    spent, decisions_s = times.spent_s, router.placement.decisions_s
    requests_s = [read + begin for read, begin in zip(spent["read"], spent["begin"], strict=True)]
    percentiles = quantiles(decisions_s, n=100)
    return {
        "decision_p50_ms": 1e3 * percentiles[49],
        "decision_p99_ms": 1e3 * percentiles[98],
        "request_cpu_ms": 1e3 * quantiles(requests_s, n=2)[0],
        "request_cpu_p99_ms": 1e3 * quantiles(requests_s, n=100)[98],
        "read_cpu_ms": 1e3 * quantiles(spent["read"], n=2)[0],
        "begin_cpu_ms": 1e3 * quantiles(spent["begin"], n=2)[0],
        "event_cpu_us": 1e6 * sum(spent["report"]) / events,
        "events_per_s": events / elapsed_s,
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m bench.route", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--workers", type=int, default=100, help="half prefill, half decode")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="in the index")
    parser.add_argument("--pool-nodes", type=int, default=0, help="that hold all texts")
    parser.add_argument("--tokens", type=int, default=100_000, help="of each prompt")
    parser.add_argument("--texts", type=int, default=20, help="that prompts go on from")
    parser.add_argument("--bodies", type=int, default=20, help="different prompts")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--events-per-s", type=float, default=6000.0, help="to apply meanwhile")
    parser.add_argument("--policy", default=RouterConfig().policy)
    arguments = parser.parse_args()
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    report = Report(benchmark="route", settings=settings, figures=measure(arguments))
    for name, value in report.figures.items():
        print(f"{name:26} {value:12.3f}")
    if arguments.json:
        report.write(arguments.json)


if __name__ == "__main__":
    main()

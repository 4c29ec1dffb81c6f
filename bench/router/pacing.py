"""Prefilling and decoding without a model, at a given pace: what `bench.router.paced_workers` serves.

Prompts are computed one after the other, in the order in which they came; a decode step is taken for all sequences that have a
seat. What is sent ahead waits here, as it would in an engine, and delays whoever comes after it.
"""

import asyncio
import json
from collections import deque
from dataclasses import asdict, dataclass, field

from baton.rpc.v1 import common_pb2, worker_pb2
from bench.router.fake_workers import first_token

TOKEN = 100
"""What every step draws."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast the workers are.

    Attributes:
        prefill_tokens_per_s: Prompt tokens computed per second.
        step_s: Time of a decode step.
        seats: Sequences that decode at once.
        vocab_size: Of the served model.
    """

    prefill_tokens_per_s: float
    step_s: float
    seats: int
    vocab_size: int

    def to_json(self) -> str:
        """One line that `bench.router.paced_workers` reads."""
        return json.dumps(asdict(self))


@dataclass(slots=True, eq=False)
class PacedPrompt:
    """One leg on the prefill worker."""

    leg_id: int
    tokens: int
    xfer_id: str
    frames: asyncio.Queue[worker_pb2.Frame]
    came_s: float


@dataclass(slots=True, eq=False)
class PacedSequence:
    """One leg on the decode worker."""

    leg_id: int
    max_tokens: int
    frames: asyncio.Queue[worker_pb2.Frame]
    position: int = 1
    gone: bool = False


@dataclass(slots=True, eq=False)
class PacedDecoder:
    """Sequences by where they stand: not handed over yet, waiting for a seat, running."""

    pace: Pace
    expected: dict[str, PacedSequence] = field(default_factory=dict)
    early: set[str] = field(default_factory=set)
    waiting: deque[PacedSequence] = field(default_factory=deque)
    running: list[PacedSequence] = field(default_factory=list)
    steps: int = 0

    def expect(self, xfer_id: str, sequence: PacedSequence) -> None:
        """A router announces a sequence; it may wait for a seat once it is handed over."""
        if xfer_id in self.early:
            self.early.remove(xfer_id)
            self.waiting.append(sequence)
        else:
            self.expected[xfer_id] = sequence

    def handed_over(self, xfer_id: str) -> None:
        """Its prompt is computed."""
        sequence = self.expected.pop(xfer_id, None)
        if sequence is None:
            self.early.add(xfer_id)
        else:
            self.waiting.append(sequence)

    async def run(self) -> None:
        """Steps for ever."""
        clock = asyncio.get_running_loop().time
        due_s = clock()
        while True:
            due_s = max(due_s + self.pace.step_s, clock())
            await asyncio.sleep(due_s - clock())
            self._step()

    def load(self) -> common_pb2.WorkerLoad:
        """As the worker reports it."""
        waiting = len(self.waiting) + len(self.expected)
        return common_pb2.WorkerLoad(running=len(self.running), waiting=waiting, steps=self.steps)

    def _step(self) -> None:
        self.running = [sequence for sequence in self.running if not sequence.gone]
        while self.waiting and len(self.running) < self.pace.seats:
            sequence = self.waiting.popleft()
            if not sequence.gone:
                self.running.append(sequence)
        self.steps += bool(self.running)
        frames: dict[asyncio.Queue[worker_pb2.Frame], worker_pb2.Frame] = {}
        for sequence in self.running:
            frame = frames.setdefault(sequence.frames, worker_pb2.Frame())
            frame.leg_ids.append(sequence.leg_id)
            frame.samples.append(0)
            frame.tokens.append(TOKEN)
            sequence.position += 1
            if sequence.position >= sequence.max_tokens:
                sequence.gone = True
                frame.finished.add(leg_id=sequence.leg_id, reason=common_pb2.FINISH_REASON_LENGTH)
        for queue, frame in frames.items():
            queue.put_nowait(frame)


@dataclass(slots=True, eq=False)
class PacedPrefiller:
    """Prompts in the order in which they came, from whichever router."""

    pace: Pace
    decoder: PacedDecoder
    prompts: asyncio.Queue[PacedPrompt] = field(default_factory=asyncio.Queue)
    cancelled: set[tuple[int, int]] = field(default_factory=set)
    pending_tokens: int = 0
    steps: int = 0

    async def run(self) -> None:
        """Computes for ever."""
        clock = asyncio.get_running_loop().time
        free_s = clock()
        while True:
            prompt = await self.prompts.get()
            key = (id(prompt.frames), prompt.leg_id)
            if key in self.cancelled:
                self.cancelled.remove(key)
                self.pending_tokens -= prompt.tokens
                continue
            queue_s = clock() - prompt.came_s
            # Counted from when the one before was to be done, so that late wake-ups do not add up.
            free_s = max(free_s, clock() - 0.005) + prompt.tokens / self.pace.prefill_tokens_per_s
            await asyncio.sleep(max(0.0, free_s - clock()))
            # As an engine counts: what is being computed is not computed yet.
            self.pending_tokens -= prompt.tokens
            self.steps += 1
            prompt.frames.put_nowait(
                first_token(
                    prompt.leg_id,
                    TOKEN,
                    queue_s=queue_s,
                    prefill_s=prompt.tokens / self.pace.prefill_tokens_per_s,
                )
            )
            self.decoder.handed_over(prompt.xfer_id)

    def load(self) -> common_pb2.WorkerLoad:
        """As the worker reports it."""
        return common_pb2.WorkerLoad(
            waiting=self.prompts.qsize(),
            steps=self.steps,
            prefill_tokens_pending=self.pending_tokens,
        )

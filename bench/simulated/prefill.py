"""A simulated prefill worker for a router's pure core: it takes its actions, lets time pass,
and answers with events.
"""

from collections import deque

from baton.generation import WorkerLoad
from baton.ids import WorkerIdentity, XferId
from bench.simulated.decode import DecodeWorker, drawn
from bench.simulated.hardware import BlockCache, Link, Room, Speed, Text
from router.dispatch.actions import SendLeg
from router.dispatch.events import BlocksReported, HandedOff, LoadReported, Prefilled


class PrefillWorker:
    """Computes prompts, one after the other, and sends their KV while it does.

    Args:
        identity: Its name.
        speed: The truth about it.
        cache: Its prefix cache.
        links: To the decode workers, by name.
        room: Where it stands.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        speed: Speed,
        cache: BlockCache,
        links: dict[WorkerIdentity, Link],
        room: Room,
    ) -> None:
        self.identity = identity
        self.busy_s = 0.0
        self.cache = cache
        self._speed = speed
        self._links = links
        self._room = room
        self._line: deque[tuple[SendLeg, Text, DecodeWorker, float]] = deque()
        self._steps = 0
        self._handing_off = 0

    @property
    def idle(self) -> bool:
        """Whether nothing is left to compute or to hand over."""
        return not self._line and not self._handing_off

    def submit(self, command: SendLeg, text: Text, decode: DecodeWorker) -> None:
        """A prompt comes."""
        self._line.append((command, text, decode, self._room.timeline.now_s))
        if len(self._line) == 1:
            self._begin()

    def report(self) -> LoadReported:
        """Its load."""
        waiting = sum(text.tokens for _, text, _, _ in self._line)
        load = WorkerLoad(
            running=min(1, len(self._line)),
            waiting=max(0, len(self._line) - 1),
            steps=self._steps,
            prefill_tokens_pending=waiting,
        )
        return LoadReported(worker=self.identity, load=load)

    def _begin(self) -> None:
        command, text, decode, came_s = self._line[0]
        assert command.permit is not None
        xfer_id = command.permit.xfer_id
        timeline = self._room.timeline
        cached = min(self.cache.depth(text.keys) * self._room.block_tokens, text.tokens - 1)
        prefill_s = self._speed.prefill_s(text.tokens - cached, cached)
        size_bytes = (text.tokens - decode.held_tokens(text)) * self._room.token_bytes
        computed_s = timeline.now_s + prefill_s
        there_s = self._links[decode.identity].carry(size_bytes, timeline.now_s, computed_s)
        arrived = Prefilled(
            worker=self.identity,
            leg_id=command.leg_id,
            first_tokens=(drawn(text.output_tokens == 1),),
            cached_tokens=cached,
            queue_s=timeline.now_s - came_s,
            prefill_s=prefill_s,
        )
        handed = HandedOff(
            worker=self.identity,
            leg_id=command.leg_id,
            blocks_sent=0,
            bytes_sent=int(size_bytes),
            reserve_wait_s=0.0,
            unhidden_s=there_s - computed_s,
        )
        self.busy_s += prefill_s
        self._handing_off += 1
        timeline.after(prefill_s, lambda: self._computed(arrived, text))
        timeline.after(
            there_s - timeline.now_s,
            lambda: self._handed_off(handed, decode, xfer_id),
        )

    def _computed(self, arrived: Prefilled, text: Text) -> None:
        self._steps += 1
        self._line.popleft()
        self._room.sink(arrived)
        self._room.sink(BlocksReported(worker=self.identity, report=self.cache.store(text.keys)))
        if self._line:
            self._begin()

    def _handed_off(self, handed: HandedOff, decode: DecodeWorker, xfer_id: XferId) -> None:
        self._handing_off -= 1
        self._room.sink(handed)
        decode.kv_arrived(xfer_id)

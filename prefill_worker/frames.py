"""What a prefill worker's next frame to one router carries."""

from baton.blocks import BlockReport
from baton.generation import WorkerLoad
from baton.rpc.generation import prompt_logprobs_to_proto, sample_to_proto
from baton.rpc.reports import blocks_to_proto, failure_to_proto, load_to_proto
from baton.rpc.v1 import common_pb2, prefill_pb2
from prefill_worker.messages import TellFailed, TellFirstTokens, TellHandedOff, TellPooled


class PrefillFrameBuilder:
    """Collects what is pending for one router."""

    def __init__(self) -> None:
        self._frame = prefill_pb2.PrefillFrame()
        self._pending = 0

    def first_tokens(self, tell: TellFirstTokens) -> None:
        """Adds the first tokens of a leg."""
        self._pending += len(tell.tokens)
        self._frame.first_tokens.append(
            prefill_pb2.FirstTokens(
                leg_id=tell.leg_id,
                tokens=[sample_to_proto(sample) for sample in tell.tokens],
                cached_tokens=tell.cached_tokens,
                queue_s=tell.queue_s,
                prefill_s=tell.prefill_s,
                prompt_logprobs=prompt_logprobs_to_proto(tell.prompt_logprobs),
                pooled_tokens=tell.pooled_tokens,
            )
        )

    def handed_off(self, tell: TellHandedOff, *, link_bytes_per_second: float) -> None:
        """Adds the end of a leg whose pages the decode worker holds."""
        self._pending += 1
        self._frame.handed_off.append(
            prefill_pb2.HandedOff(
                leg_id=tell.leg_id,
                blocks_sent=tell.done.blocks_sent,
                bytes_sent=tell.done.bytes_sent,
                reserve_wait_s=tell.done.reserve_wait_s,
                unhidden_s=tell.done.unhidden_s,
                link_bytes_per_second=link_bytes_per_second,
            )
        )

    def pooled(self, tell: TellPooled) -> None:
        """Adds the end of a leg whose prompt lies in the pool."""
        self._pending += 1
        self._frame.pooled.append(prefill_pb2.Pooled(leg_id=tell.leg_id))

    def failed(self, tell: TellFailed) -> None:
        """Adds the end of a leg that failed."""
        self._pending += 1
        failure = failure_to_proto(tell.error)
        self._frame.failed.append(common_pb2.LegFailed(leg_id=tell.leg_id, failure=failure))

    def pending(self) -> int:
        """How many entries wait."""
        return self._pending

    def build(
        self, load: WorkerLoad | None, blocks: BlockReport | None
    ) -> prefill_pb2.PrefillFrame:
        """Everything that waits, as one frame."""
        frame, self._frame, self._pending = self._frame, prefill_pb2.PrefillFrame(), 0
        if load is not None:
            frame.load.CopyFrom(load_to_proto(load))
        if blocks is not None:
            frame.blocks.CopyFrom(blocks_to_proto(blocks))
        return frame

"""What a worker's next frame to one router carries: the tokens of all its sequences as columns,
and what became of its legs.
"""

from baton.blocks import BlockReport
from baton.generation import TokenLogprobs, WorkerLoad
from baton.rpc.generation import (
    finish_to_proto,
    logprobs_to_proto,
    prompt_logprobs_to_proto,
    sample_to_proto,
)
from baton.rpc.hello import WorkerHello, hello_to_proto, identity_to_proto
from baton.rpc.reports import blocks_to_proto, failure_to_proto, load_to_proto
from baton.rpc.v1 import common_pb2
from baton.rpc.v1 import worker_pb2 as pb
from baton_worker.messages import (
    FailedMessage,
    HandedOffMessage,
    LinkProbedMessage,
    PooledMessage,
    PrefilledMessage,
    TokensMessage,
    WriterLostMessage,
)

_NO_LOGPROBS = common_pb2.TokenLogprobs()


class FrameBuilder:
    """Collects what is pending for one router. Columns are plain lists: copied into the frame at once,
    not one by one.
    """

    def __init__(self) -> None:
        self.step = 0
        self._leg_ids: list[int] = []
        self._samples: list[int] = []
        self._tokens: list[int] = []
        self._logprobs: dict[int, TokenLogprobs] = {}  # by place in the columns
        self._told = pb.Frame()
        """All but the columns: as little as there is of it, it may lie in a message from the start."""
        self._num_told = 0

    def hello(self, hello: WorkerHello) -> None:
        """Adds what the worker is from now on."""
        self._told.hello.CopyFrom(hello_to_proto(hello))

    def tokens(self, message: TokensMessage) -> None:
        """Adds the tokens that the router's legs drew in one step."""
        before = len(self._tokens)
        self._leg_ids += message.leg_ids
        self._samples += message.samples
        self._tokens += message.tokens
        for place, logprobs in message.logprobs.items():
            self._logprobs[before + place] = logprobs
        for place, reason in message.finish_reasons.items():
            self._told.finished.add(
                leg_id=message.leg_ids[place],
                sample=message.samples[place],
                reason=finish_to_proto(reason),
            )

    def prefilled(self, message: PrefilledMessage) -> None:
        """Adds the account of a prompt that was computed here, with the first tokens of a prefill leg."""
        self._num_told += 1 + len(message.first_tokens)
        self._told.prefilled.add(
            leg_id=message.leg_id,
            first_tokens=[sample_to_proto(sample) for sample in message.first_tokens],
            cached_tokens=message.cached_tokens,
            pooled_tokens=message.pooled_tokens,
            queue_s=message.queue_s,
            prefill_s=message.prefill_s,
            prompt_logprobs=prompt_logprobs_to_proto(message.prompt_logprobs),
        )

    def handed_off(self, message: HandedOffMessage, *, link_bytes_per_second: float) -> None:
        """Adds the end of a leg whose pages the receiving worker holds."""
        self._num_told += 1
        done = message.done
        self._told.handed_off.add(
            leg_id=message.leg_id,
            blocks_sent=done.blocks_sent,
            bytes_sent=done.bytes_sent,
            reserve_wait_s=done.reserve_wait_s,
            unhidden_s=done.unhidden_s,
            link_bytes_per_second=link_bytes_per_second,
        )

    def pooled(self, message: PooledMessage) -> None:
        """Adds the end of a leg whose prompt lies in the pool."""
        self._num_told += 1
        self._told.pooled.add(leg_id=message.leg_id)

    def writer_lost(self, message: WriterLostMessage) -> None:
        """Adds the loss of a leg's sender."""
        self._num_told += 1
        failure = failure_to_proto(message.error)
        self._told.writers_lost.add(leg_id=message.leg_id, attempt=message.attempt, failure=failure)

    def failed(self, message: FailedMessage) -> None:
        """Adds the end of a leg that failed."""
        self._num_told += 1
        failure = failure_to_proto(message.error)
        self._told.failed.add(leg_id=message.leg_id, failure=failure)

    def link_probed(self, message: LinkProbedMessage) -> None:
        """Adds what came of trying a link."""
        self._num_told += 1
        probed = self._told.links_probed.add(target=identity_to_proto(message.peer))
        if message.error is not None:
            probed.failure.CopyFrom(failure_to_proto(message.error))

    def pending(self) -> int:
        """How many entries wait."""
        return len(self._leg_ids) + self._num_told

    def build(self, load: WorkerLoad | None, blocks: BlockReport | None) -> pb.Frame:
        """Everything that waits, as one frame."""
        frame, self._told, self._num_told = self._told, pb.Frame(), 0
        frame.step = self.step
        frame.leg_ids.extend(self._leg_ids)
        frame.samples.extend(self._samples)
        frame.tokens.extend(self._tokens)
        if self._logprobs:
            found = map(self._logprobs.get, range(len(self._tokens)))
            frame.logprobs.extend(
                _NO_LOGPROBS if logprobs is None else logprobs_to_proto(logprobs)
                for logprobs in found
            )
        if load is not None:
            frame.load.CopyFrom(load_to_proto(load))
        if blocks is not None:
            frame.blocks.CopyFrom(blocks_to_proto(blocks))
        for column in (self._leg_ids, self._samples, self._tokens):
            column.clear()
        self._logprobs.clear()
        return frame

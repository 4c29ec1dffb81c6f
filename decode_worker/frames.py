"""What a decode worker's next frame to one router carries: the tokens of all its sequences, as columns."""

from baton.blocks import BlockReport
from baton.generation import TokenLogprobs, WorkerLoad
from baton.rpc.generation import finish_to_proto, logprobs_to_proto, prompt_logprobs_to_proto
from baton.rpc.reports import blocks_to_proto, failure_to_proto, load_to_proto
from baton.rpc.v1 import common_pb2, decode_pb2
from decode_worker.messages import TellFailed, TellPrefilled, TellTokens, TellWriterLost

_NO_LOGPROBS = common_pb2.TokenLogprobs()


class DecodeFrameBuilder:
    """Collects what is pending for one router. Plain lists: copied into the frame at once, not one by one."""

    def __init__(self) -> None:
        self.step = 0
        self._leg_ids: list[int] = []
        self._samples: list[int] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs | None] = []
        self._any_logprobs = False
        self._finished: list[decode_pb2.SampleFinished] = []
        self._failed: list[common_pb2.LegFailed] = []
        self._prefilled: list[decode_pb2.LocalPrefill] = []
        self._writers_lost: list[decode_pb2.WriterLost] = []

    def tokens(self, tell: TellTokens) -> None:
        """Adds the tokens that one leg drew in one step."""
        for sample in tell.tokens:
            self._leg_ids.append(tell.leg_id)
            self._samples.append(sample.sample)
            self._tokens.append(sample.token)
            self._logprobs.append(sample.logprobs)
            self._any_logprobs = self._any_logprobs or sample.logprobs is not None
            if sample.finish is not None:
                self._finished.append(
                    decode_pb2.SampleFinished(
                        leg_id=tell.leg_id,
                        sample=sample.sample,
                        reason=finish_to_proto(sample.finish),
                    )
                )

    def prefilled(self, tell: TellPrefilled) -> None:
        """Adds the account of a leg that was prefilled here."""
        self._prefilled.append(
            decode_pb2.LocalPrefill(
                leg_id=tell.leg_id,
                cached_tokens=tell.cached_tokens,
                queue_s=tell.queue_s,
                prefill_s=tell.prefill_s,
                prompt_logprobs=prompt_logprobs_to_proto(tell.prompt_logprobs),
                pooled_tokens=tell.pooled_tokens,
            )
        )

    def writer_lost(self, tell: TellWriterLost) -> None:
        """Adds the loss of a leg's prefill worker."""
        failure = failure_to_proto(tell.error)
        self._writers_lost.append(
            decode_pb2.WriterLost(leg_id=tell.leg_id, attempt=tell.attempt, failure=failure)
        )

    def failed(self, tell: TellFailed) -> None:
        """Adds the end of a leg that failed."""
        failure = failure_to_proto(tell.error)
        self._failed.append(common_pb2.LegFailed(leg_id=tell.leg_id, failure=failure))

    def pending(self) -> int:
        """How many entries wait."""
        told = len(self._failed) + len(self._prefilled) + len(self._writers_lost)
        return len(self._leg_ids) + told

    def build(self, load: WorkerLoad | None, blocks: BlockReport | None) -> decode_pb2.DecodeFrame:
        """Everything that waits, as one frame."""
        frame = decode_pb2.DecodeFrame(
            step=self.step,
            leg_ids=self._leg_ids,
            samples=self._samples,
            tokens=self._tokens,
            logprobs=self._logprob_column(),
            finished=self._finished,
            failed=self._failed,
            prefilled=self._prefilled,
            writers_lost=self._writers_lost,
            load=None if load is None else load_to_proto(load),
            blocks=None if blocks is None else blocks_to_proto(blocks),
        )
        for column in (self._leg_ids, self._samples, self._tokens, self._logprobs):
            column.clear()
        self._finished, self._failed, self._prefilled, self._writers_lost = [], [], [], []
        self._any_logprobs = False
        return frame

    def _logprob_column(self) -> list[common_pb2.TokenLogprobs]:
        if not self._any_logprobs:
            return []
        return [
            _NO_LOGPROBS if logprobs is None else logprobs_to_proto(logprobs)
            for logprobs in self._logprobs
        ]

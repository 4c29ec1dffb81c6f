"""The requests that are in the engine, by name: how one comes, and how it goes with everything that it holds."""

from collections.abc import Iterable

from baton.errors import InvariantError
from baton.generation import Prompt, TokenLogprobs
from baton.ids import BlockId, SeqId
from baton_engine.scheduling.limits import Limits
from baton_engine.scheduling.pager import Pager
from baton_engine.scheduling.request import Branch, Mode, Request, State
from baton_engine.scheduling.roster import Roster


class RequestBook:
    """Every request from its arrival until nothing of it is left.

    Args:
        limits: What the engine takes.
        roster: Where branches stand.
        pager: Where their pages go back to.
        eos_ids: The model's end-of-sequence tokens.
    """

    def __init__(
        self, limits: Limits, roster: Roster, pager: Pager, eos_ids: Iterable[int]
    ) -> None:
        self._limits = limits
        self._roster = roster
        self._pager = pager
        self._eos_ids = frozenset(eos_ids)
        self._requests: dict[SeqId, Request] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, seq_id: SeqId) -> Request | None:
        """The request of that name, if it is here."""
        return self._requests.get(seq_id)

    def open(self, seq_id: SeqId, mode: Mode, prompt: Prompt, now_s: float) -> None:
        """A prompt that this engine can serve takes its place in line."""
        ttft_s = prompt.slo.ttft_s
        request = Request(
            seq_id=seq_id,
            mode=mode,
            prompt=prompt,
            arrival=self._arrivals,
            stop_ids=self._stop_ids(prompt),
            final_len=self._limits.final_len(prompt),
            scores=_no_scores_yet(prompt, mode),
            deadline_s=None if ttft_s is None else now_s + ttft_s,
        )
        self._arrivals += 1
        self._requests[seq_id] = request
        self._roster.add(request.undivided(), State.WAITING)

    def _stop_ids(self, prompt: Prompt) -> frozenset[int]:
        sampling = prompt.sampling
        eos_ids = frozenset() if sampling.ignore_eos else self._eos_ids
        return eos_ids.union(sampling.stop_token_ids)

    def finish(self, branch: Branch) -> None:
        """A branch ends; with the last one its request does."""
        self._pager.release(branch)
        self._roster.move(branch, State.ENDED)
        if not branch.request.branches:
            del self._requests[branch.request.seq_id]
            self._pager.settle(branch.request)

    def end(self, request: Request) -> None:
        """All branches of a request end."""
        for branch in tuple(request.branches):
            self.finish(branch)

    def check_integrity(self) -> list[BlockId]:
        """Raises InvariantError unless every branch is in its place and holds what its state demands.

        Returns:
            The pages that branches hold, each as often as it is held.
        """
        branches = [branch for request in self._requests.values() for branch in request.branches]
        self._roster.check_integrity(branches)
        if not all(request.branches for request in self._requests.values()):
            raise InvariantError("a request without branches is still known")
        held: list[BlockId] = []
        for branch in branches:
            branch.check_integrity(self._limits.block_tokens)
            held += branch.seq.blocks + branch.parked
        return held


def _no_scores_yet(prompt: Prompt, mode: Mode) -> list[TokenLogprobs] | None:
    """Scores are wanted of whoever computes the prompt, not of who is handed its pages."""
    wanted = prompt.sampling.prompt_logprobs is not None and mode is not Mode.RESERVE
    return [] if wanted else None

"""What a computed step brings in: tokens for those who drew, full pages for later prompts, ends."""

from collections.abc import Sequence

from baton.generation import FinishReason, TokenLogprobs, TokenSample
from baton.ids import SeqId
from baton_engine.messages import Sampled
from baton_engine.scheduling.pager import Pager
from baton_engine.scheduling.plan import Drawn, StepPlan, StepResult
from baton_engine.scheduling.request import Branch, Mode, State
from baton_engine.scheduling.requests import RequestBook
from baton_engine.scheduling.roster import Roster


class Harvest:
    """Takes steps' results to the branches whose rows they were.

    Args:
        requests: Who is here.
        roster: Where branches stand.
        pager: Publishes what is full.
        block_tokens: Tokens per page.
    """

    def __init__(
        self, requests: RequestBook, roster: Roster, pager: Pager, block_tokens: int
    ) -> None:
        self._requests = requests
        self._roster = roster
        self._pager = pager
        self._block_tokens = block_tokens

    def bring_in(
        self, plan: StepPlan, branches: Sequence[Branch], result: StepResult
    ) -> list[Sampled]:
        """The outcome of `plan`, whose rows are those of `branches`. Branches that have ended are passed over."""
        sampled: dict[SeqId, list[TokenSample]] = {}
        scored: dict[SeqId, tuple[TokenLogprobs, ...]] = {}
        for place, row in enumerate(plan.rows):
            branch, drawn = branches[place], result.drawn[place]
            if branch.state is State.ENDED:
                continue
            seq = branch.seq
            if row.num_scored:
                branch.request.keep_scores(row.start, result.scores[place])
            seq.num_computed += row.num_tokens
            if seq.num_computed >= (branch.num_published + 1) * self._block_tokens:
                self._pager.publish(branch)
            if drawn:
                tokens = self._receive(branch, drawn)
                sampled.setdefault(seq.seq_id, []).extend(tokens)
                if branch.request.scores is not None:
                    scored[seq.seq_id] = branch.request.hand_out_scores()
        for fetch in plan.fetches:
            if (request := self._requests.get(fetch.seq_id)) is not None:
                self._pager.settle(request)
        return [
            Sampled(seq_id=seq_id, tokens=tuple(tokens), prompt_logprobs=scored.get(seq_id))
            for seq_id, tokens in sampled.items()
        ]

    def _receive(self, branch: Branch, drawn: tuple[Drawn, ...]) -> tuple[TokenSample, ...]:
        request, seq = branch.request, branch.seq
        if branch.state is State.PREFILLING:
            return self._end_prefill(branch, drawn)
        (draw,) = drawn
        seq.tokens.append(draw.token)
        finish = request.finish_of(draw.token, len(seq.tokens))
        if finish is not None:
            self._requests.finish(branch)
        return (_sample(seq.sample, draw, finish),)

    def _end_prefill(self, branch: Branch, drawn: tuple[Drawn, ...]) -> tuple[TokenSample, ...]:
        request, length = branch.request, len(branch.seq.tokens) + 1
        first_tokens = tuple(
            _sample(sample, draw, request.finish_of(draw.token, length))
            for sample, draw in zip(branch.samples, drawn, strict=True)
        )
        if request.mode is Mode.PREFILL:
            self._roster.move(branch, State.HANDING_OVER)
        else:
            self.fan_out(branch, first_tokens)
        return first_tokens

    def fan_out(self, leader: Branch, first_tokens: tuple[TokenSample, ...]) -> None:
        """Lets each sample that is not finished run on its own: the first takes the leader's pages, the others share."""
        going_on = [first for first in first_tokens if first.finish is None]
        if not going_on:
            self._requests.finish(leader)
            return
        forks = [self._pager.fork(leader, first) for first in going_on[1:]]
        first = going_on[0]
        leader.seq.sample = first.sample
        leader.seq.tokens.append(first.token)
        self._roster.move(leader, State.RUNNING, samples=(first.sample,))
        for fork in forks:
            self._roster.add(fork, State.RUNNING)


def _sample(sample: int, draw: Drawn, finish: FinishReason | None) -> TokenSample:
    return TokenSample(sample=sample, token=draw.token, logprobs=draw.logprobs, finish=finish)

"""Beam search: of all texts that may follow a prompt, those that the model finds likeliest,
as transformers searches for them. Pure.

Each beam is a text that goes on. A step extends every beam by one token, and the best extensions of all of them are the
beams of the next one; those that end are kept apart, the best of them. Two beams that go on from the same text share
its pages, as samples share their prompt's: the scheduler forks its sequence,
and nothing is copied but the page that both would write to.

    beams      the ▸ cat ▸ sat            the ▸ cat ▸ sat ▸ on        (sample 0 goes on as sample 0)
               a ▸ dog ▸ ran       ──►    the ▸ cat ▸ sat ▸ by        (forked from sample 0; sample 1 ends)
    finished                              a ▸ dog ▸ ran ▸ END
"""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from heapq import merge
from itertools import islice
from operator import attrgetter, itemgetter

from baton.generation import EarlyStopping, FinishReason, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """A text, as its last token and the text before it.

    Attributes:
        before: All but the last token; None for the prompt.
        token: The last one.
        length: How many there are.
        score: The sum of their log-probabilities.
        logprobs: The last token's, where its client wants them.
    """

    before: "Beam | None" = None
    token: int = 0
    length: int = 0
    score: float = 0.0
    logprobs: TokenLogprobs | None = None

    def tokens(self) -> "list[Beam]":
        """The text token by token, in order."""
        text: list[Beam] = []
        last = self
        while last.before is not None:
            text.append(last)
            last = last.before
        return text[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedText:
    """A text that has ended.

    Attributes:
        text: Its tokens.
        finish: Why it ended.
        score: By which it is compared to others.
    """

    text: Beam
    finish: FinishReason
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """A beam of the next step: that of sample `parent` and a `token`. It is called `sample`,
    which is `parent` for one extension of each.
    """

    parent: int
    sample: int
    token: int


class BeamSearch:
    """The search for one request.

    Args:
        sampling: What its client asks for.
        samples: What its beams are called; as many texts are found.
        stop_ids: Tokens that end a text.
        max_tokens: So many tokens end it too.

    Attributes:
        params: How each step draws: nothing, but it tells the likeliest next tokens.
        finished: The best texts that have ended, best first.
        is_over: Whether nothing better is looked for any more.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        samples: tuple[int, ...],
        stop_ids: AbstractSet[int],
        max_tokens: int,
    ) -> None:
        assert sampling.beam_search is not None
        self._rules = sampling.beam_search
        self._samples = samples
        self._width = len(samples)
        self._stop_ids = stop_ids
        self._max_tokens = max_tokens
        self._asked_logprobs = sampling.logprobs
        # Enough for a full set of beams where each of them could end with any of the tokens that end texts.
        self._num_candidates = max(2, 1 + len(stop_ids)) * self._width
        self.params = replace(sampling, temperature=0.0, logprobs=self._num_candidates)
        self.finished: list[FinishedText] = []
        self.is_over = False
        self._beams: dict[int, Beam] = {}
        self.restart()

    def restart(self) -> None:
        """From the prompt on."""
        self.finished = []
        self._beams = {self._samples[0]: Beam()}

    def step(self, likeliest: Mapping[int, TokenLogprobs]) -> list[Extension]:
        """Extends every beam by one token.

        Args:
            likeliest: By sample, the likeliest tokens behind each beam; at first behind the prompt,
                as the first sample's.

        Returns:
            The beams of the next step, best first; none where the search is over.
        """
        going_on: list[tuple[int, Beam]] = []
        candidates = islice(self._candidates(likeliest), self._num_candidates)
        for rank, (score, sample, place) in enumerate(candidates):
            known = likeliest[sample]
            before = self._beams[sample]
            token = known.top_tokens[place]
            text = Beam(before, token, before.length + 1, score, self._logprobs(known, place))
            finish = self._finish_reason(text)
            if finish is None:
                if len(going_on) < self._width:
                    going_on.append((sample, text))
            elif rank < self._width:
                self._keep(text, finish)
        self.is_over = not going_on or self._cannot_improve(going_on[0][1])
        return [] if self.is_over else self._named(going_on)

    def _candidates(
        self, likeliest: Mapping[int, TokenLogprobs]
    ) -> Iterator[tuple[float, int, int]]:
        """(score, sample, place among the sample's likeliest tokens), highest score first."""

        def of(sample: int) -> Iterator[tuple[float, int, int]]:
            score = self._beams[sample].score
            for place, logprob in enumerate(likeliest[sample].top_logprobs):
                yield score + logprob, sample, place

        return merge(*map(of, sorted(self._beams)), key=itemgetter(0), reverse=True)

    def _logprobs(self, known: TokenLogprobs, place: int) -> TokenLogprobs | None:
        """The log-probabilities of one of the likeliest tokens, as its client asked for them."""
        top = self._asked_logprobs
        if top is None:
            return None
        return TokenLogprobs(
            logprob=known.top_logprobs[place],
            rank=place + 1,
            top_tokens=known.top_tokens[:top],
            top_logprobs=known.top_logprobs[:top],
        )

    def _finish_reason(self, text: Beam) -> FinishReason | None:
        if text.token in self._stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if text.length >= self._max_tokens else None

    def _score(self, text: Beam, length: int) -> float:
        """What the score of `text` would be if it had `length` tokens."""
        score: float = text.score / length**self._rules.length_penalty
        return score

    def _keep(self, text: Beam, finish: FinishReason) -> None:
        ended = FinishedText(text=text, finish=finish, score=self._score(text, text.length))
        best = sorted([*self.finished, ended], key=attrgetter("score"), reverse=True)
        self.finished = best[: self._width]

    def _cannot_improve(self, best: Beam) -> bool:
        """Whether the search is over though beams could go on, the `best` of them first."""
        if len(self.finished) < self._width:
            return False
        rules = self._rules
        if rules.early_stopping is EarlyStopping.ALWAYS:
            return True
        looks_ahead = rules.early_stopping is EarlyStopping.NEVER and rules.length_penalty > 0.0
        length = self._max_tokens if looks_ahead else best.length
        return self._score(best, length) <= self.finished[-1].score

    def _named(self, going_on: list[tuple[int, Beam]]) -> list[Extension]:
        """Gives each beam its sample: its parent's, or one that no parent goes on with."""
        parents = {parent for parent, _ in going_on}
        free = iter([sample for sample in self._samples if sample not in parents])
        self._beams, extensions = {}, []
        for parent, text in going_on:
            sample = next(free) if parent in self._beams else parent
            self._beams[sample] = text
            extensions.append(Extension(parent=parent, sample=sample, token=text.token))
        return extensions

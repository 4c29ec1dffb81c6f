"""How a text may go on: what followed its last tokens where they stood before, in the text itself or in what was
generated for other requests of its scope (SuffixDecoding, Oliaro et al. 2024, arXiv 2411.04975). Pure.

The paper counts in suffix trees of a bounded depth. Here the last places of each gram of one token and of three are
kept, and the part of the tree that drafts are taken from is counted when they are asked for: a token is added at the
same small cost however deep the tree is, and it takes some 350 bytes where the tree would have up to `depth` nodes.

    places of  b c            1: … a b c x y           suffix   followed by      drafts, up to as many as tokens match
                              2: … a b c x z           a b c    x y │ x z │ x y  x (1.0) y (0.67)
                              3: … a b c x y           b c      … and w          x (0.75) y (0.5)
                              4: … d b c w
"""

from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import accumulate, count, pairwise

from baton.config.speculative import SuffixSpeculation

_LONG = 3
_GRAMS = (_LONG, 1)
_PLACES = 16
"""Of one gram that are kept, the last ones: all are compared for each draft."""

_WINDOW = 8192
"""Of one text with its prompt that are known, its last ones: 3 MB at most."""

_LONGEST_OUTPUT, _MOST_OUTPUTS_TOKENS = 1 << 15, 1 << 18
"""Tokens that are kept of one output, its first ones, and of all: 90 MB at most."""

_FORGET_PER_READ = 2

_END_BITS = 32
_END_MASK = (1 << _END_BITS) - 1


@dataclass(slots=True, eq=False)
class Text:
    """One of the texts of a tree. Its owner adds to `tokens`, the tree reads on in them.

    Attributes:
        number: Its number among those of the tree, by age.
        tokens: All of it.
        first: The first place that is known; a place is the number of tokens before it.
        end: The first that is not known yet.
    """

    number: int
    tokens: list[int]
    first: int = 1
    end: int = 1


@dataclass(frozen=True, slots=True)
class Continuation:
    """Tokens with which a text may go on, and how many of them are expected to be right."""

    tokens: list[int]
    score: float


NO_CONTINUATION = Continuation([], 0.0)


class DraftLengths:
    """How many tokens may be drafted behind so many that match.

    Args:
        depth: What match and drafts come to at most.
        spec_factor: Drafts per token that matches.

    Attributes:
        longest_match: The longest one that leaves room for a draft.
    """

    def __init__(self, depth: int, spec_factor: float) -> None:
        self.longest_match = depth - 1
        self._allowed = [
            max(0, min(int(spec_factor * length + 1e-6), depth - length))
            for length in range(max(depth, _LONG))
        ]
        self._most = list(accumulate(self._allowed, max))

    def allowed(self, shortest: int, longest: int) -> int:
        """Behind a match of any length from `shortest` to `longest`."""
        return max(self._allowed[shortest : longest + 1])

    def most(self, longest: int) -> int:
        """Behind a match of up to `longest` tokens."""
        return self._most[longest]

    @property
    def most_of_all(self) -> int:
        """Behind any match."""
        return self._most[-1]


class SuffixTree:
    """The texts of one scope, by their substrings.

    Args:
        lengths: How much may be drafted.
        min_token_prob: Drafts that are less likely than this, all before them included, are left out.
    """

    def __init__(self, lengths: DraftLengths, min_token_prob: float) -> None:
        self._lengths = lengths
        self._min_token_prob = min_token_prob
        self._texts: dict[int, Text] = {}
        self._numbers = count()
        self._places: dict[int | tuple[int, ...], list[int]] = {}
        """Of a gram, text and place in one number, in the order in which they were read."""

    @property
    def num_texts(self) -> int:
        """That are not removed."""
        return len(self._texts)

    @property
    def num_places(self) -> int:
        """That are kept, of all grams."""
        return sum(map(len, self._places.values()))

    def add(self, tokens: list[int], first: int = 1) -> Text:
        """A further text, of which nothing is read yet; from place `first` on it will be."""
        text = Text(number=next(self._numbers), tokens=tokens, first=first, end=first)
        self._texts[text.number] = text
        return text

    def read(self, text: Text, most: int) -> int:
        """Reads on in a text by up to `most` of its tokens; returns by how many. Its end is left out:
        nothing follows it yet.
        """
        tokens, code = text.tokens, text.number << _END_BITS
        first, end = text.end, max(text.end, min(len(text.tokens), text.end + most))
        for place in range(first, end):
            for size in _GRAMS:
                if place < size:
                    continue
                gram = _gram(tokens, place, size)
                places = self._places.get(gram)
                if places is None:
                    self._places[gram] = [code | place]
                    continue
                if len(places) == _PLACES:
                    del places[0]
                places.append(code | place)
        text.end = end
        return end - first

    def forget(self, text: Text, most: int) -> int:
        """Forgets up to `most` places of a text, the first ones; returns how many."""
        tokens, code = text.tokens, text.number << _END_BITS
        first, end = text.first, min(text.end, text.first + most)
        for place in range(first, end):
            for size in _GRAMS:
                if place < size:
                    continue
                gram = _gram(tokens, place, size)
                places = self._places.get(gram)
                if places is not None and (code | place) in places:
                    places.remove(code | place)
                    if not places:
                        del self._places[gram]
        text.first = end
        return end - first

    def remove(self, text: Text) -> None:
        """Nothing of a text is found any more; what is kept of it goes as it is forgotten."""
        del self._texts[text.number]

    def continuation(
        self, tokens: list[int], most: int, best: Continuation = NO_CONTINUATION
    ) -> Continuation:
        """How a text that ends with `tokens` may go on, by up to `most` tokens, if that promises more than `best`;
        else that.

        For each length of a match, the likeliest token follows, then the likeliest behind that one, and so on; of
        equally likely ones that which stands last in the last text.
        Taken is the length of which the most drafts are expected to be right.
        """
        context = tokens[-self._lengths.longest_match :]
        by_length = self._long_matches(context)
        reached = [
            place for length in sorted(by_length, reverse=True) for place in by_length[length]
        ]
        ways: list[tuple[int, int, int]] = []
        num_reached = 0
        for length, shorter in pairwise([*sorted(by_length, reverse=True), _LONG - 1]):
            num_reached += len(by_length[length])
            ways.append(
                (min(most, self._lengths.allowed(shorter + 1, length)), length, num_reached)
            )
        for allowed, _, num_reached in sorted(ways, reverse=True):
            if allowed <= best.score:
                break
            best = self._better(best, reached[:num_reached], allowed)
        if best.score >= min(most, self._lengths.most(_LONG - 1)) or not context:
            return best
        two, one = self._short_matches(context, set(reached))
        for length, places in ((2, reached + two), (1, reached + two + one)):
            allowed = min(most, self._lengths.allowed(length, length))
            if allowed > best.score:
                best = self._better(best, places, allowed)
        return best

    def _long_matches(self, context: list[int]) -> dict[int, list[int]]:
        """Where the last three or more tokens of `context` stood, by how many of them did."""
        by_length: dict[int, list[int]] = {}
        wanted = len(context)
        if wanted < _LONG:
            return by_length
        for place in self._places.get(tuple(context[-_LONG:]), ()):
            text = self._texts.get(place >> _END_BITS)
            if text is None:
                continue
            tokens, end = text.tokens, place & _END_MASK
            length = wanted
            if end < wanted or tokens[end - wanted : end] != context:
                length, most = _LONG, min(end, wanted)
                while length < most and tokens[end - length - 1] == context[-length - 1]:
                    length += 1
            if length in by_length:
                by_length[length].append(place)
            else:
                by_length[length] = [place]
        return by_length

    def _short_matches(self, context: list[int], long: set[int]) -> tuple[list[int], list[int]]:
        """Where the last two tokens of `context` stood and not three, and where the last one did and not two;
        `long` are places of more.
        """
        two: list[int] = []
        one: list[int] = []
        for place in self._places.get(context[-1], ()):
            text = self._texts.get(place >> _END_BITS)
            if text is None or place in long:
                continue
            end = place & _END_MASK
            are_two = end > 1 and len(context) > 1 and text.tokens[end - 2] == context[-2]
            (two if are_two else one).append(place)
        return two, one

    def _better(self, best: Continuation, places: list[int], allowed: int) -> Continuation:
        found = self._walk(sorted(places, reverse=True), allowed)
        return found if found.score > best.score else best

    def _walk(self, places: list[int], allowed: int) -> Continuation:
        """The likeliest tokens behind `places`, one after the other."""
        followed: list[list[int]] = []
        for place in places:
            end = place & _END_MASK
            followed.append(self._texts[place >> _END_BITS].tokens[end : end + allowed])
        drafts: list[int] = []
        probability, score = 1.0, 0.0
        while followed:
            at = len(drafts)
            if followed.count(followed[0]) == len(followed):
                drafts += followed[0][at:]
                return Continuation(drafts, score + probability * (len(drafts) - at))
            column = [tokens[at] for tokens in followed if len(tokens) > at]
            token = column[0]
            num_alike = column.count(token)
            if num_alike < len(column):
                token = max(dict.fromkeys(column), key=column.count)
                num_alike = column.count(token)
                probability *= num_alike / len(column)
                if probability < self._min_token_prob:
                    break
            if num_alike < len(followed):
                followed = [t for t in followed if len(t) > at and t[at] == token]
            drafts.append(token)
            score += probability
        return Continuation(drafts, score)


def _gram(tokens: list[int], end: int, size: int) -> int | tuple[int, ...]:
    return tokens[end - 1] if size == 1 else tuple(tokens[end - size : end])


@dataclass(slots=True, eq=False)
class Output:
    """What was generated for one sample so far, as others of its scope may see it.

    Attributes:
        tree: Its scope's.
        text: It in there.
        is_kept: Whether it is in the tree still.
    """

    tree: SuffixTree
    text: Text
    is_kept: bool = True


class SharedOutputs:
    """What was generated for the requests of each scope, in a tree of its own: nothing of one scope is ever found,
    or counted, for another.

    Bounded by requests and by tokens, over all scopes; those that began first go first.

    Args:
        lengths: How much may be drafted.
        min_token_prob: See `SuffixTree`.
        max_requests: Outputs that are kept; 0 for none.
        max_tokens: What they come to.
    """

    def __init__(
        self,
        lengths: DraftLengths,
        min_token_prob: float,
        max_requests: int,
        max_tokens: int = _MOST_OUTPUTS_TOKENS,
    ) -> None:
        self._lengths = lengths
        self._min_token_prob = min_token_prob
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._trees: dict[str, SuffixTree] = {}
        self._outputs: dict[Output, str] = {}
        self._unread: deque[Output] = deque()
        self._leaving: deque[Output] = deque()
        self.num_tokens = 0

    @property
    def num_outputs(self) -> int:
        """That are kept."""
        return len(self._outputs)

    @property
    def num_places(self) -> int:
        """That are kept of them, of all grams, and of those that are being forgotten."""
        return sum(tree.num_places for tree in self._trees.values())

    @property
    def num_scopes(self) -> int:
        """Of which outputs are kept."""
        return len(self._trees)

    def begin(self, scope: str) -> Output:
        """Another output of `scope`, empty still."""
        tree = self._trees.get(scope)
        if tree is None:
            tree = self._trees[scope] = SuffixTree(self._lengths, self._min_token_prob)
        output = Output(tree=tree, text=tree.add([]))
        self._outputs[output] = scope
        self._evict()
        return output

    def extend(self, output: Output, tokens: SequenceOf[int], prompt_len: int) -> None:
        """An output goes on; `tokens` are all of it, behind its prompt. Nothing happens if it is not kept any more."""
        if not output.is_kept:
            return
        known = output.text.tokens
        new = tokens[prompt_len + len(known) : prompt_len + _LONGEST_OUTPUT]
        known += new
        self.num_tokens += len(new)
        self._evict()

    def read(self, output: Output, most: int) -> int:
        """Reads on in an output by up to `most` tokens; returns by how many. Some of what was evicted is forgotten."""
        num_read = output.tree.read(output.text, most) if output.is_kept else 0
        self._forget(_FORGET_PER_READ * num_read)
        return num_read

    def end(self, output: Output) -> None:
        """Nothing follows; what is unread of it is read with `read_ended`."""
        while self._unread and not self._unread[0].is_kept:  # nobody may read for long
            self._unread.popleft()
        if output.is_kept:
            self._unread.append(output)

    def read_ended(self, most: int) -> int:
        """Reads on in outputs that have ended by up to `most` tokens; returns by how many."""
        num_read = 0
        while self._unread and num_read < most:
            output = self._unread[0]
            num_read += self.read(output, most - num_read)
            if not output.is_kept or output.text.end >= len(output.text.tokens):
                self._unread.popleft()
        return num_read

    def clear(self) -> None:
        """None is kept any more, nor what follows of those that have not ended."""
        for output in self._outputs:
            output.is_kept = False
        self._outputs.clear()
        self._trees.clear()
        self._unread.clear()
        self._leaving.clear()
        self.num_tokens = 0

    def continuation(
        self, scope: str, tokens: list[int], most: int, best: Continuation = NO_CONTINUATION
    ) -> Continuation:
        """See `SuffixTree.continuation`."""
        tree = self._trees.get(scope)
        return best if tree is None else tree.continuation(tokens, most, best)

    def _evict(self) -> None:
        while len(self._outputs) > self._max_requests or self.num_tokens > self._max_tokens:
            output = next(iter(self._outputs))
            scope = self._outputs.pop(output)
            output.is_kept = False
            output.tree.remove(output.text)
            self.num_tokens -= len(output.text.tokens)
            if not output.tree.num_texts:
                del self._trees[scope]
            elif output.text.end > output.text.first:
                self._leaving.append(output)
            else:  # nothing of it was read, so nothing has to be forgotten
                output.text.tokens = []

    def _forget(self, most: int) -> None:
        while self._leaving and most > 0:
            output = self._leaving[0]
            most -= output.tree.forget(output.text, most)
            if output.text.first >= output.text.end or not output.tree.num_texts:
                self._leaving.popleft()


class SuffixIndex:
    """What is looked up for one text: in itself, and in the outputs of its scope, to which its own is added.

    Args:
        lengths: How much may be drafted.
        min_token_prob: See `SuffixTree`.
        outputs: Of others; None where none are kept.
        scope: Whose outputs it may see, and who sees its own.
        prompt_len: Leading tokens that are no output.
    """

    def __init__(
        self,
        lengths: DraftLengths,
        min_token_prob: float,
        *,
        outputs: SharedOutputs | None,
        scope: str,
        prompt_len: int,
    ) -> None:
        self._lengths = lengths
        self._min_token_prob = min_token_prob
        self._outputs = outputs
        self._scope = scope
        self._prompt_len = prompt_len
        self._output: Output | None = None
        self._tree = SuffixTree(lengths, min_token_prob)
        self._text: Text | None = None

    @property
    def num_kept(self) -> int:
        """Places of its own text that are kept."""
        return self._tree.num_places

    def clear(self) -> None:
        """Forgets all that was read of the text itself."""
        self._tree = SuffixTree(self._lengths, self._min_token_prob)
        self._text = None

    def read(self, tokens: list[int], most: int) -> int:
        """Reads on in `tokens`, the whole text, by up to `most` of them, and then in those of them that are output, for
        others; returns by how many.
        """
        text = self._text
        if text is None or len(tokens) - text.end > _WINDOW:
            self.clear()
            text = self._text = self._tree.add(tokens, max(1, len(tokens) - _WINDOW))
        text.tokens = tokens
        num_read = self._tree.read(text, most)
        self._tree.forget(text, max(0, text.end - text.first - _WINDOW))
        if self._outputs is None:
            return num_read
        output = self._extend(self._outputs, tokens)
        return num_read + self._outputs.read(output, most - num_read)

    def end(self, tokens: list[int]) -> None:
        """The text is over; what is output of it is kept for others."""
        if self._outputs is not None:
            self._outputs.end(self._extend(self._outputs, tokens))

    def _extend(self, outputs: SharedOutputs, tokens: list[int]) -> Output:
        if self._output is None:
            self._output = outputs.begin(self._scope)
        outputs.extend(self._output, tokens, self._prompt_len)
        return self._output

    def continuation(self, tokens: list[int], most: int) -> list[int]:
        """Up to `most` tokens with which the text may go on, by itself or by the outputs of its scope,
        whichever promises more.
        """
        best = self._tree.continuation(tokens, most)
        if self._outputs is not None and best.score < min(most, self._lengths.most_of_all):
            best = self._outputs.continuation(self._scope, tokens, most, best)
        return best.tokens


class SuffixDrafter:
    """Drafts of a worker's texts.

    Args:
        config: How much is drafted, and kept.
    """

    def __init__(self, config: SuffixSpeculation) -> None:
        self._lengths = DraftLengths(config.max_tree_depth, config.max_spec_factor)
        self._min_token_prob = config.min_token_prob
        self._outputs: SharedOutputs | None = None
        if config.max_cached_requests:
            self._outputs = SharedOutputs(
                self._lengths, config.min_token_prob, config.max_cached_requests
            )

    def index(self, scope: str, prompt_len: int) -> SuffixIndex:
        """For a text of `scope`, whose first tokens are a prompt."""
        return SuffixIndex(
            self._lengths,
            self._min_token_prob,
            outputs=self._outputs,
            scope=scope,
            prompt_len=prompt_len,
        )

    def read_ended(self, most: int) -> int:
        """See `SharedOutputs.read_ended`."""
        return 0 if self._outputs is None else self._outputs.read_ended(most)

    def flush(self) -> None:
        """Nothing that was generated is kept for others any more."""
        if self._outputs is not None:
            self._outputs.clear()

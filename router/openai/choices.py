"""One sample on its way to the client: tokens come in, pieces of text that may be shown go out."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.generation import FinishReason, TokenSample
from router.detokenizer import StopStrings
from router.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """What of a sample's tokens becomes text.

    Attributes:
        stops: Stop strings.
        include_stop: Whether what ended the sample (stop string or stop token) is shown.
        min_tokens: Stop strings are not looked for in this many tokens.
        skip_special: Whether special tokens are left out of the text.
        silent: No token is wanted at all: the first one drawn ends the sample and is not told of.
    """

    stops: Sequence[str] = ()
    include_stop: bool = False
    min_tokens: int = 0
    skip_special: bool = True
    silent: bool = False


@dataclass(slots=True, eq=False)
class LoggedToken:
    """A token with log-probabilities and where in the choice's text it begins."""

    sample: TokenSample
    text_offset: int


@dataclass(slots=True, eq=False)
class Delta:
    """What one choice gained. `finish` is set on its last one, and `stop` if that was for a stop string."""

    index: int
    text: str
    tokens: list[int] = field(default_factory=list)
    logged: list[LoggedToken] = field(default_factory=list)
    finish: FinishReason | None = None
    stop: str | None = None


class Choice:
    """The text of one sample, while it grows.

    Attributes:
        num_tokens: Tokens generated, hidden ones included.
        finish: Why it ended; None while it runs.
    """

    def __init__(self, index: int, tokenizer: Tokenizer, options: TextOptions) -> None:
        self.num_tokens = 0
        self.finish: FinishReason | None = None
        self._index = index
        self._options = options
        self._decoder = tokenizer.decoder(skip_special=options.skip_special)
        self._stops = StopStrings(options.stops, include=options.include_stop)
        self._decoded_length = 0
        self._text = ""
        self._tokens: list[int] = []
        self._logged: list[LoggedToken] = []

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self.finish is not None

    def push(self, sample: TokenSample) -> None:
        """Takes the next token. One that was under way when a stop string matched is dropped."""
        if self.finish is not None:
            return
        if self._options.silent:
            self.finish = FinishReason.LENGTH
            return
        self.num_tokens += 1
        self._tokens.append(sample.token)
        if sample.logprobs is not None:
            self._logged.append(LoggedToken(sample, self._decoded_length))
        if sample.finish is not FinishReason.STOP or self._options.include_stop:
            self._show(self._decoder.push(sample.token))
        if sample.finish is not None:
            self._show(self._decoder.finish())
            self._text += self._stops.finish()
        self.finish = FinishReason.STOP if self._stops.matched is not None else sample.finish

    def take(self) -> Delta | None:
        """What may be shown now and was not before; None if there is nothing.

        Ids and log-probabilities of tokens whose text is held back wait for it.
        """
        if not self._text and self.finish is None:
            return None
        delta = Delta(
            self._index, self._text, self._tokens, self._logged, self.finish, self._stops.matched
        )
        self._text, self._tokens, self._logged = "", [], []
        return delta

    def _show(self, text: str) -> None:
        self._decoded_length += len(text)
        if not self._options.stops:
            self._text += text
            return
        watched = self.num_tokens > self._options.min_tokens
        self._text += self._stops.push(text) if watched else text


def token_ids(deltas: Sequence[Delta]) -> list[int]:
    """Ids of all tokens of one choice, those without visible text included."""
    return [token for delta in deltas for token in delta.tokens]

"""`baton chat`: a conversation with any server that speaks OpenAI's API.

On a terminal it goes on until /exit; otherwise standard input is one question, and only its answer is printed.
"""

import argparse
import contextlib
import sys
import time
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import httpx
from rich.console import Console
from rich.markup import escape

from baton.errors import BatonError, ConfigError, first_line
from baton_cluster.cli.completions import (
    ChatMessage,
    Piece,
    ReportedUsage,
    Text,
    first_model,
    stream_chat,
)

_HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer"
_TIMEOUT = httpx.Timeout(600.0, connect=10.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The server, the model, the key and the system message."""
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="server (default %(default)s)"
    )
    parser.add_argument("--model", help="model name (default: the first that the server serves)")
    parser.add_argument("--api-key", help="bearer key", metavar="KEY")
    parser.add_argument("--system", help="system message", metavar="TEXT")


def run(arguments: argparse.Namespace) -> int:
    """Talks until the user has had enough."""
    with _client(arguments.url, arguments.api_key) as client:
        model = arguments.model or first_model(client)
        conversation = ChatSession(client, model=model, system=arguments.system)
        if sys.stdin.isatty():
            _talk(conversation, Console())
        else:
            _print(conversation.ask(sys.stdin.read()))
    return 0


def _client(url: str, api_key: str | None) -> httpx.Client:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    base_url = url.rstrip("/").removesuffix("/v1")
    try:
        return httpx.Client(base_url=base_url, headers=headers, timeout=_TIMEOUT)
    except httpx.InvalidURL as error:
        raise ConfigError(f"--url {url}: {error}", param="--url") from error
    except UnicodeError:  # of the key
        raise
    except (ImportError, OSError, ValueError) as error:
        # ALL_PROXY and its like may name a kind of proxy that is not supported, SSL_CERT_FILE a file that is not there.
        why = first_line(error)
        raise ConfigError(f"the environment's proxy or certificates: {why}") from error


@dataclass(slots=True, eq=False)
class Pace:
    """How fast one answer came."""

    begun_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    last_s: float = 0.0
    tokens: int = 0

    def note(self, piece: Piece) -> None:
        """Counts a piece that has just arrived."""
        match piece:
            case Text():
                self.last_s = time.monotonic()
                self.first_s = self.first_s or self.last_s
                self.tokens += (
                    1  # Nearly every piece is one token; a server's own count replaces it.
                )
            case ReportedUsage():
                self.tokens = piece.completion_tokens
            case _:
                return

    @property
    def ttft_s(self) -> float | None:
        """Time to the first piece of text, or None if there was none."""
        return None if self.first_s is None else self.first_s - self.begun_s

    @property
    def tokens_per_s(self) -> float | None:
        """After the first token; None if there is no second."""
        if self.first_s is None or self.tokens < 2 or self.last_s <= self.first_s:
            return None
        return (self.tokens - 1) / (self.last_s - self.first_s)

    def summary(self) -> str:
        """`first token after 85 ms · 32 tokens · 41.2 tokens/s`."""
        if self.ttft_s is None:
            return "an empty answer"
        parts = [f"first token after {self.ttft_s * 1000:.0f} ms", f"{self.tokens} tokens"]
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.1f} tokens/s")
        return " · ".join(parts)


class ChatSession:
    """A conversation so far, and the model that answers it.

    Attributes:
        model: The model that answers.
        pace: Of the latest answer.
    """

    def __init__(self, client: httpx.Client, *, model: str, system: str | None) -> None:
        self.model = model
        self.pace = Pace()
        self._client = client
        self._opening = [ChatMessage(role="system", content=system)] if system else []
        self._messages = list(self._opening)

    def reset(self) -> None:
        """Forgets all but the system message."""
        self._messages = list(self._opening)

    def ask(self, question: str) -> Iterator[str]:
        """The answer as it arrives. Question and answer are remembered only if it comes to its end."""
        asked = [*self._messages, ChatMessage(role="user", content=question)]
        self.pace = Pace()
        answer: list[str] = []
        for piece in stream_chat(self._client, model=self.model, messages=asked):
            self.pace.note(piece)
            if isinstance(piece, Text):
                answer.append(piece.text)
                yield piece.text
        self._messages = [*asked, ChatMessage(role="assistant", content="".join(answer))]


def printable(text: str) -> str:
    """`text` without control characters: what a model says must not steer the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def _talk(conversation: ChatSession, console: Console) -> None:
    with contextlib.suppress(ImportError):  # Some builds of Python lack it.
        import readline  # noqa: F401  # gives `input` its line editing and history
    console.print(f"[bold]{escape(conversation.model)}[/] [dim]({_HELP})[/]")
    while (line := _read_line()) is not None:
        match line.strip():
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/reset":
                conversation.reset()
                console.print("[dim]forgotten[/]")
            case command if command.startswith("/"):
                console.print(f"[dim]{_HELP}[/]")
            case _:
                _answer(conversation, line, console)


def _read_line() -> str | None:
    """What was typed; None at the end of input. Ctrl-C drops the line: it may have come too late for an answer."""
    try:
        return input("› ")
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return ""
    except EOFError:
        sys.stdout.write("\n")
        return None


def _answer(conversation: ChatSession, question: str, console: Console) -> None:
    try:
        _print(conversation.ask(question))
        console.print(f"[dim]{conversation.pace.summary()}[/]")
    except KeyboardInterrupt:
        console.print("\n[dim]stopped[/]")
    except BatonError as error:
        # The conversation goes on: the next question may well be answered.
        console.print(f"[red]{escape(error.message)}[/]")


def _print(answer: Iterable[str]) -> None:
    for text in answer:
        sys.stdout.write(printable(text))
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()

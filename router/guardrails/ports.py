"""What an operator's guardrail implements. Two small protocols: one for what is asked, one for what is answered.

A guardrail is named in the operator's configuration only (`router.guardrails`), by an entry point of the group
`baton.guardrails` or as `package.module:attribute`; the attribute is called without arguments, once, at start. It runs
on the router's event loop: what takes long belongs behind an `await`.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedText:
    """One text of a request: a message, or a prompt (whose role is `prompt`).

    What a conversation has besides can pass or be refused, not be replaced: names and reasoning of its messages as they
    are, their calls as JSON (all with the message's role); its tools (`tools`) and the template's arguments
    (`template`) as JSON.
    """

    role: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardrailInput:
    """What is asked, by which tenant, of which model."""

    tenant_id: str
    model: str
    texts: tuple[GuardedText, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Nothing to object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replace:
    """It goes on with these texts instead, one for each, in order."""

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """It ends here; the message is shown to the client."""

    message: str


class OutputGuard(Protocol):
    """Watches one choice of one reply, from its first piece to its last."""

    async def piece(self, text: str, *, last: bool) -> str | Refuse:
        """What of the text so far may be shown now. What is held back must come with a later piece,
        or with the last.
        """


class Guardrail(Protocol):
    """One check."""

    async def check_input(self, asked: GuardrailInput) -> Pass | Replace | Refuse:
        """Looks at what is asked, before it is tokenized."""

    def watch_output(self, asked: GuardrailInput) -> OutputGuard | None:
        """What watches one choice of the answer; None if nothing needs to."""

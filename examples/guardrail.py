"""A guardrail: e-mail addresses reach neither the model nor the client.

With this file on the router's `PYTHONPATH`, in cluster.yaml:

    router:
      guardrails: ["guardrail:RedactAddresses"]

The router calls `RedactAddresses()` once, at start. The contract is `router/guardrails/ports.py`.
"""

import re

from router.guardrails.ports import GuardrailInput, OutputGuard, Pass, Refuse, Replace

_ADDRESS = re.compile(r"[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,4}")
_REDACTED = "[address]"
_MAX_WORD = 400
"""Longer than any address: a word of more characters is refused instead of being held back for ever."""


class RedactAddresses:
    """Replaces addresses in what is asked and in what is answered."""

    async def check_input(self, asked: GuardrailInput) -> Pass | Replace | Refuse:
        """The messages without their addresses."""
        texts = tuple(_ADDRESS.sub(_REDACTED, text.text) for text in asked.texts)
        if texts == tuple(text.text for text in asked.texts):
            return Pass()
        return Replace(texts=texts)

    def watch_output(self, asked: GuardrailInput) -> OutputGuard:  # noqa: ARG002  # every answer is watched alike
        """A watcher for one choice."""
        return _WordByWord()


class _WordByWord:
    """Holds back the word that is being written: an address may come in several pieces."""

    def __init__(self) -> None:
        self._held = ""

    async def piece(self, text: str, *, last: bool) -> str | Refuse:
        """The whole words, without addresses."""
        self._held += text
        end = len(self._held) if last else 1 + max(map(self._held.rfind, " \n\t"), default=-1)
        words, self._held = self._held[:end], self._held[end:]
        if len(self._held) > _MAX_WORD:
            return Refuse(message="The answer holds a word that is too long to be checked.")
        return _ADDRESS.sub(_REDACTED, words)

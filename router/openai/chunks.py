"""The chunks of a stream of OpenAI's older endpoints: what stands around the choices of each,
and how the stream ends.
"""

from collections.abc import Callable, Sequence

import msgspec

from router.generation.generation_run import Delta, GenerationRun
from router.generation.planner import RequestContext
from router.http.streaming import CUT
from router.openai.replies import Usage, usage_of
from router.openai.requests import GenerationBody
from router.ports import Timing


class Chunks:
    """Writes the chunks of one request, joining bytes that were made once: no model object per token.

    Every chunk ends with the token counts so far, with their place held for the last chunk, or with neither.

    Args:
        kind: The `object` of each.
        context: The request.
        body: What its client asked for.
        runs: The generations whose tokens are counted.
    """

    def __init__(
        self,
        kind: str,
        context: RequestContext,
        body: GenerationBody,
        runs: Sequence[GenerationRun],
    ) -> None:
        opening = {
            "id": context.request_id,
            "object": kind,
            "created": context.created,
            "model": context.account.model,
        }
        self._head = b"data: " + msgspec.json.encode(opening)[:-1]
        self._runs = runs
        self._counts_at_end = body.usage_in_stream
        self._counts_always = body.usage_in_chunks
        self._usual_tail = b',"usage":null}\n\n' if body.usage_in_stream else b"}\n\n"

    def chunk(self, choice: bytes, more: bytes = b"") -> bytes:
        """The one with this choice, and `more` members after it."""
        tail = _usage_tail(usage_of(self._runs)) if self._counts_always else self._usual_tail
        return b'%b,"choices":[%b]%b%b' % (self._head, choice, more, tail)

    def end(self, timings: Sequence[Timing]) -> bytes:
        """A chunk without choices where the client asked for the token counts, comments with the timings,
        and `[DONE]`.
        """
        counts = b""
        if self._counts_at_end:
            counts = self._head + b',"choices":[]' + _usage_tail(usage_of(self._runs))
        comments = [b": baton " + msgspec.json.encode(timing) + b"\n\n" for timing in timings]
        return counts + b"".join(comments) + b"data: [DONE]\n\n"


IDS_AT_ONCE = 16_384
"""Token ids that are written before the event loop runs again."""


def token_ids_field(delta: Delta) -> bytes:
    """The member that a streamed choice ends with when its client asked for token ids."""
    return b',"token_ids":' + msgspec.json.encode(delta.tokens)


def prompt_ids_field(run: GenerationRun) -> bytes:
    """The member with the prompt's ids, for the first chunk."""
    return b',"prompt_token_ids":' + msgspec.json.encode(list(run.request.prompt.prompt_tokens))


def _usage_tail(usage: Usage) -> bytes:
    return b',"usage":' + usage.model_dump_json().encode() + b"}\n\n"


class TextEvents:
    """Events of choices that gained some text and nothing else that is shown.

    Args:
        write: Writes the event of one choice, with `CUT` wherever the text's JSON stands.
    """

    def __init__(self, write: Callable[[int], bytes]) -> None:
        self._write = write
        self._around: dict[int, list[bytes]] = {}

    def __call__(self, delta: Delta) -> bytes:
        """The event for one delta."""
        around = self._around.get(delta.index)
        if around is None:
            around = self._around[delta.index] = self._write(delta.index).split(CUT)
        return msgspec.json.encode(delta.text).join(around)

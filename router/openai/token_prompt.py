"""Long prompts of token ids, taken out of a body before it is checked: read as one array instead of a number at a time."""

import msgspec
import numpy as np

from baton.tokens import PackedTokens
from router.openai.fields import MAX_PROMPT_TOKENS

_WORTH_BYTES = 4096
"""Shorter bodies are checked as they are, in less time than it takes to look into them."""

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NUMBERS = b"0123456789, \t\r\n"
_TOO_LARGE = 2**31


def take_token_prompt(body: bytes) -> tuple[bytes, PackedTokens] | None:
    """The body with a short prompt in the place of its long one, and that prompt.

    None for every other body, and for one with any fault: whoever checks it then finds the fault, or none.
    """
    if len(body) < _WORTH_BYTES:
        return None
    try:
        fields = _FIELDS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # too deep: the check says so
        return None
    tokens = _token_array(bytes(fields.get("prompt", b"")))
    if tokens is None:
        return None
    fields["prompt"] = msgspec.Raw(b"[0]")
    return msgspec.json.encode(fields), tokens


def _token_array(raw: bytes) -> PackedTokens | None:
    inner = raw[1:-1]
    # It is JSON, so what consists of these signs is a list of whole numbers.
    if raw[:1] != b"[" or not inner.strip() or inner.translate(None, _NUMBERS):
        return None
    tokens = np.fromstring(
        inner, dtype=np.int64, sep=","
    )  # one that does not fit becomes the largest
    if len(tokens) > MAX_PROMPT_TOKENS or tokens.max() >= _TOO_LARGE:
        return None
    return PackedTokens(tokens.astype("<u4").tobytes())

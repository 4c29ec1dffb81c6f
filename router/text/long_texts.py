"""Encodes long texts in a child process, one after the other; tenants take turns.

The `tokenizers` package makes of each token several objects of some 150 bytes together, frees them while it keeps every
thread of the process waiting, and gives the ids out as so many Python numbers. Of a million tokens that is a tenth of a
second, and hundreds of megabytes which the process keeps. In a child (`router.text.encoding_child`) neither is the
router's: what comes back is four bytes per token. A child that has encoded a very long text is ended,
and its memory with it.
"""

from functools import partial

import tokenizers

from baton.errors import ChildEndedError, InvalidRequestError
from baton.telemetry.logs import get_logger
from baton.tokens import PackedTokens
from router.templates.child import AskedProcess
from router.tenants.fair_threads import FairThreads
from router.text import encoding_child

LONG_TEXT = 256 * 1024
"""Characters from which on a text is encoded here."""

MAX_MEMORY_BYTES = 2 * 1024**3
"""Of a child, besides its tokenizer: 256 bytes for each of the largest body (`router.max_body_bytes` as it is by
default). The package takes up to 190.
"""

MAX_ENCODE_S = 120.0
"""How long one text may take; 8 MiB take some five seconds on a core."""

_KEPT_TEXT = 1024 * 1024
"""A child is kept after a text of up to so many bytes."""

_MAX_REPLY_BYTES = 2**30
_log = get_logger(__name__)


class LongTextEncoder:
    """One model's tokenizer for long texts. A child starts with the first one.

    Args:
        backend: The tokenizer, as it is to be used.
        memory_bytes: What a child may take for a text.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, *, memory_bytes: int = MAX_MEMORY_BYTES
    ) -> None:
        self._memory_bytes = memory_bytes
        self._settings = memory_bytes.to_bytes(8, "little") + backend.to_str().encode()
        self._thread = FairThreads(1, "long texts")
        self._child: AskedProcess | None = None

    async def encode(
        self, text: str, *, tenant_id: str, add_special_tokens: bool, param: str
    ) -> PackedTokens:
        """Token ids of `text`, which came in the field `param` of a request of that tenant. If this is cancelled before
        the text has its turn, it is not encoded.

        Raises:
            InvalidRequestError: It takes too long, or too much memory.
            UnavailableError: There is no process to encode it in.
        """
        work = partial(self._encode, text, add_special_tokens, param)
        return await self._thread.run(tenant_id, work)

    def close(self) -> None:
        """Ends the child; a text that is being encoded is finished first."""
        self._thread.close()
        self._end_child()

    def _encode(self, text: str, add_special_tokens: bool, param: str) -> PackedTokens:
        if self._child is None or not self._child.alive():
            self._end_child()
            self._child = AskedProcess(
                encoding_child.__file__,
                self._settings,
                purpose="encode long texts",
                max_reply_bytes=_MAX_REPLY_BYTES,
            )
        asked = (b"\1" if add_special_tokens else b"\0") + text.encode()
        try:
            reply = self._child.ask(asked, MAX_ENCODE_S)
        except TimeoutError as error:
            self._child = None
            _log.warning("a text took too long to encode", limit_s=MAX_ENCODE_S)
            raise InvalidRequestError(
                f"{param}: more than {MAX_ENCODE_S:g} seconds would be needed to encode it.",
                param=param,
            ) from error
        except ChildEndedError as error:
            self._child = None
            _log.warning("the process that encodes long texts ended", signal=error.by_signal)
            raise InvalidRequestError(
                f"{param}: it ended the process that encodes it, which has {self._memory_bytes} bytes of memory.",
                param=param,
            ) from error
        if len(asked) > _KEPT_TEXT:
            self._end_child()
        return PackedTokens(bytes(reply))

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None

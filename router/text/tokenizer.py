"""Text into token ids: the first thing that happens to a request, and the last place that sees its text as a whole.

The tokenizer and its chat template come from the model's directory (`baton.pretrained`). Threads may share the Rust
tokenizer. Prompts take a while, so encoding and rendering run in a few threads of their own, where tenants take turns,
and never on the event loop. Chat templates are rendered in processes of their own (`router.templates.renderer`),
long texts encoded in another (`router.text.long_texts`).
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path

from baton.errors import InvalidRequestError
from baton.pretrained import PretrainedTokenizer, read_tokenizer
from baton.tokens import PackedTokens
from router.templates.renderer import (
    MAX_RENDER_S,
    MAX_RENDERED_CHARS,
    Conversation,
    TemplateRenderer,
)
from router.tenants.fair_threads import FairThreads
from router.text.detokenizer import Detokenizer
from router.text.long_texts import LONG_TEXT, LongTextEncoder
from router.text.token_bytes import ByteDecoder, ByteTable, PieceTable, TokenDecoder, is_byte_level

_SHORT_TEXT = 4096
"""Characters that are encoded in a millisecond or two."""
_DECODED_AT_ONCE = 256
_STEPS_AT_ONCE = 1024


class Tokenizer:
    """One model's tokenizer, for one event loop and any number of requests.

    Attributes:
        backend: The Rust tokenizer; `router.text.detokenizer` decodes with it.
        special_ids: Ids whose text is not shown to clients.
        special_texts: How their tokens are written.
        pieces: The bytes that each single token stands for.
        longest_token: Characters of the longest token as the vocabulary spells it; none stands for more.
    """

    def __init__(
        self,
        pretrained: PretrainedTokenizer,
        *,
        threads: int = 2,
        template_s: float = MAX_RENDER_S,
        max_chars: int = MAX_RENDERED_CHARS,
        content_format: str = "auto",
    ) -> None:
        backend = pretrained.backend
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.special_texts = frozenset(added[i].content for i in self.special_ids)
        self.pieces = PieceTable(backend, added)
        self.longest_token = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
        self.chat_template = pretrained.chat_template
        self._renderer = (
            TemplateRenderer(
                pretrained.chat_template,
                pretrained.special_tokens,
                content_format=content_format,
                limit_s=template_s,
                max_chars=max_chars,
            )
            if pretrained.chat_template
            else None
        )
        self._byte_table = ByteTable(backend, self.special_ids) if is_byte_level(backend) else None
        self._decoding = asyncio.Lock()
        self._long_texts = LongTextEncoder(backend)
        self._threads = FairThreads(threads, "tokenizer", each=threads)

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        threads: int = 2,
        template_s: float = MAX_RENDER_S,
        max_chars: int = MAX_RENDERED_CHARS,
        chat_template: str | None = None,
        content_format: str = "auto",
    ) -> "Tokenizer":
        """Reads the tokenizer of a model's directory (a hub snapshot is one). A `chat_template` takes the place of the
        model's. Blocks; call it at start.

        Raises:
            ModelLoadError: There is none, or it cannot be read.
        """
        pretrained = read_tokenizer(directory)
        if chat_template is not None:
            pretrained = replace(pretrained, chat_template=chat_template)
        return cls(
            pretrained,
            threads=threads,
            template_s=template_s,
            max_chars=max_chars,
            content_format=content_format,
        )

    @property
    def vocab_size(self) -> int:
        """Ids that have a text lie below this."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    async def encode(
        self, text: str, *, tenant_id: str, add_special_tokens: bool, param: str = "prompt"
    ) -> PackedTokens:
        """Token ids of `text`, which came in the field `param` of a request of that tenant.
        Special tokens written out in it become those tokens, as in vLLM.

        Raises:
            InvalidRequestError: It takes too much time or memory.
            UnavailableError: There is no process to encode it in.
        """
        if len(text) > LONG_TEXT:
            return await self._long_texts.encode(
                text, tenant_id=tenant_id, add_special_tokens=add_special_tokens, param=param
            )
        return await self._threads.run(tenant_id, lambda: self._encode(text, add_special_tokens))

    async def encode_words(self, words: Sequence[str], *, tenant_id: str) -> list[PackedTokens]:
        """Token ids of each of a tenant's short texts, without special tokens around them."""
        encodings = await self._threads.run(
            tenant_id,
            lambda: self.backend.encode_batch_fast(list(words), add_special_tokens=False),
        )
        return [PackedTokens.of(encoding.ids) for encoding in encodings]

    async def encode_chat(self, conversation: Conversation, *, tenant_id: str) -> PackedTokens:
        """Token ids of a tenant's conversation, rendered by the model's chat template (`router.templates.renderer`).

        Raises:
            InvalidRequestError: There is no template, it refuses these messages, or they take too much time or memory.
            UnavailableError: There is no process to render it in, or to encode it.
        """
        special = conversation.add_special_tokens

        def encoded() -> PackedTokens | str:
            text = self._render(conversation)
            return text if len(text) > LONG_TEXT else self._encode(text, special)

        done = await self._threads.run(tenant_id, encoded)
        if isinstance(done, PackedTokens):
            return done
        return await self.encode(
            done, tenant_id=tenant_id, add_special_tokens=special, param=conversation.param
        )

    async def decode_steps(self, token_ids: Sequence[int]) -> list[str]:
        """The text that each token adds to those before it; all together they are the text, without special tokens."""
        decoder, steps = self.decoder(), list[str]()
        for begin in range(0, len(token_ids), _STEPS_AT_ONCE):
            steps += [decoder.push(i) for i in token_ids[begin : begin + _STEPS_AT_ONCE]]
            await asyncio.sleep(0)
        return [*steps[:-1], steps[-1] + decoder.finish()] if steps else []

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of `token_ids`, special tokens included."""
        return "".join([text async for text in self.decode_pieces(token_ids)])

    async def decode_pieces(self, token_ids: Sequence[int]) -> AsyncGenerator[str, None]:
        """The same in pieces, each of whole characters. Some tokens are decoded at a time, since the Rust decoder keeps
        every thread of this process waiting; lists of more take turns, so that however many there are, one step is
        taken before the event loop runs again. A list of one step waits for none of them.
        """
        decoder = Detokenizer(self.backend, frozenset())
        if len(token_ids) <= _DECODED_AT_ONCE:
            yield decoder.push_all(token_ids) + decoder.finish()
            return
        for begin in range(0, len(token_ids), _DECODED_AT_ONCE):
            async with self._decoding:
                text = decoder.push_all(token_ids[begin : begin + _DECODED_AT_ONCE])
                await asyncio.sleep(0)
            yield text
        yield decoder.finish()

    def decoder(self, *, skip_special: bool = True) -> TokenDecoder:
        """Turns the tokens of one sample into text while they come; special tokens have none unless they are wanted."""
        if not skip_special:
            return Detokenizer(self.backend, frozenset())
        if self._byte_table is not None:
            return ByteDecoder(self._byte_table)
        return Detokenizer(self.backend, self.special_ids)

    def token_text(self, token_id: int) -> str:
        """The token as the vocabulary spells it; empty for an id without one."""
        return self.backend.id_to_token(token_id) or ""

    def close(self) -> None:
        """Ends the threads and the child processes; what they have begun is finished."""
        self._threads.close()
        self._long_texts.close()
        if self._renderer is not None:
            self._renderer.close()

    def _encode(self, text: str, add_special_tokens: bool) -> PackedTokens:
        if len(text) <= _SHORT_TEXT:
            encoding = self.backend.encode(text, add_special_tokens=add_special_tokens)
        else:  # of the backend's ways to encode, that of batches alone lets other threads run meanwhile
            (encoding,) = self.backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        return PackedTokens.of(encoding.ids)

    def _render(self, conversation: Conversation) -> str:
        if self._renderer is None:
            raise InvalidRequestError(
                "This model has no chat template; send the prompt to /v1/completions.",
                param=conversation.param,
            )
        return self._renderer.render(conversation)

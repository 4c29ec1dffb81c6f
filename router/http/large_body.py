"""Bodies that would keep the event loop from all else if they were parsed in one go: read in pieces,
between which it runs.

What makes a large body large is bounded by kind: texts of any length are cheap; lists of token ids become packed
numbers; the messages of a conversation are parsed some at a time;
everything else together may hold so many values only.
"""

import asyncio
import re
from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from baton.errors import InvalidRequestError
from baton.tokens import PackedTokens
from router.http.errors import from_validation
from router.http.fields import (
    LONG_LISTS,
    MAX_CHOICES,
    MAX_CONTAINERS,
    MAX_ELEMENTS,
    MAX_FIELDS,
    MAX_PROMPT_TOKENS,
    MAX_VALUES,
    TOKEN_LISTS,
)
from router.http.json_cuts import Piece, TooManyPiecesError, cut

_Body = TypeVar("_Body", bound=BaseModel)

_AT_ONCE = 512
"""Values that are parsed before the event loop runs again: about a millisecond."""

_NUMBERS = b"0123456789, \t\r\n"
_TOO_LARGE = 2**31
_STEP_BYTES = 256 * 1024
_KEY = re.compile(rb'\s*"([^"\\]*)"\s*:\s*')
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_VALUE = msgspec.json.Decoder(msgspec.Raw)


async def parse_large(raw: bytes, schema: type[_Body]) -> _Body:
    """The JSON object `raw` as `schema`.

    Raises:
        InvalidRequestError: Not JSON, not what `schema` allows, or made of too many parts.
    """
    if (
        raw.count(b'"') <= 2 * MAX_FIELDS
    ):  # a long prompt of token ids and little else: less work than below
        taken = await _take_tokens(raw)
        if taken is not None and len(taken[0]) <= _STEP_BYTES // 8:
            rest, name, tokens = taken
            body = _validated(rest, schema)
            setattr(body, name, tokens)
            return body
    members = await _members(raw)
    short: list[bytes] = []
    long: dict[str, Any] = {}
    num_values = 0
    for name, place, value_begin in members:
        if name in long:
            raise InvalidRequestError(f"{name}: given more than once.", param=name)
        if place.values > _AT_ONCE and name in TOKEN_LISTS:
            long[name] = await _token_lists(raw[value_begin : place.end].strip(), name)
            stand_in = [[0]] * len(long[name]) if isinstance(long[name], list) else [0]
            short.append(msgspec.json.encode({name: stand_in})[1:-1])
        elif place.values > _AT_ONCE and name in LONG_LISTS and name in schema.model_fields:
            first, long[name] = await _elements(raw, value_begin, place.end, name, schema)
            short.append(b'"%b":[%b]' % (name.encode(), first))
        else:
            short.append(raw[place.begin : place.end])
            num_values += place.values
            if num_values > MAX_VALUES:
                raise InvalidRequestError(
                    f"{name[:40] or 'The body'}: with it, fields other than {', '.join((*LONG_LISTS, *TOKEN_LISTS))} hold "
                    f"more than {MAX_VALUES} values.",
                    param=name[:40] or None,
                )
    if not long:
        return _validated(raw, schema)
    body = _validated(b"{" + b",".join(short) + b"}", schema)
    for name, value in long.items():
        setattr(body, name, value)
    return body


def token_array(raw: bytes) -> PackedTokens | None:
    """The token ids of a JSON array; None if it is, or may be, anything else."""
    inner = raw[1:-1]
    # It is JSON, so what consists of these signs is a list of whole numbers.
    if raw[:1] != b"[" or not inner.strip() or inner.translate(None, _NUMBERS):
        return None
    return _numbers(inner)


async def _take_tokens(raw: bytes) -> tuple[bytes, str, PackedTokens] | None:
    """The body with a short list in the place of its long one, that one's name, and its ids;
    None if there is no such list.
    """
    try:
        fields = _FIELDS.decode(raw)
    except (
        msgspec.DecodeError,
        UnicodeDecodeError,
        RecursionError,
    ):  # what is wrong is found later
        return None
    for name in TOKEN_LISTS:
        value = bytes(fields.get(name, b""))
        if len(value) > _STEP_BYTES // 8 and (tokens := await _long_token_array(value)) is not None:
            fields[name] = msgspec.Raw(b"[0]")
            return msgspec.json.encode(fields), name, tokens
    return None


async def _long_token_array(raw: bytes) -> PackedTokens | None:
    """As `token_array`, in steps; `raw` need not be JSON."""
    if raw[:1] != b"[" or raw[-1:] != b"]":
        return None
    packed: list[bytes] = []
    begin, num_tokens = 1, 0
    while begin < len(raw):
        end = raw.find(b",", begin + _STEP_BYTES)
        end = len(raw) - 1 if end < 0 else end
        step = raw[begin:end]
        if step.translate(None, _NUMBERS) or not _is_json(b"[0,%b]" % step):
            return None
        tokens = _numbers(step)
        if tokens is None:
            return None
        num_tokens += len(tokens)
        if num_tokens > MAX_PROMPT_TOKENS:
            return None
        packed.append(tokens.packed)
        begin = end + 1
        await asyncio.sleep(0)
    return PackedTokens(b"".join(packed))


def _is_json(raw: bytes) -> bool:
    try:
        _VALUE.decode(raw)
    except msgspec.DecodeError:
        return False
    return True


def _numbers(inner: bytes) -> PackedTokens | None:
    """What stands in a JSON array of whole numbers: of what is none, some would be read as 0."""
    tokens = np.fromstring(
        inner, dtype=np.int64, sep=","
    )  # one that does not fit becomes the largest
    if not len(tokens) or len(tokens) > MAX_PROMPT_TOKENS or tokens.max() >= _TOO_LARGE:
        return None
    return PackedTokens(tokens.astype("<u4").tobytes())


async def _members(raw: bytes) -> list[tuple[str, Piece, int]]:
    """The object's members: the name of each (empty if it has signs that are written in another way), its place, and
    where its value begins.
    """
    begin, end = len(raw) - len(raw.lstrip()), len(raw.rstrip())
    if raw[begin : begin + 1] != b"{" or raw[end - 1 : end] != b"}":
        raise InvalidRequestError("The body is not a JSON object.")
    try:
        found = await cut(raw, begin, end, most=MAX_FIELDS)
    except TooManyPiecesError:
        raise InvalidRequestError(f"The body has more than {MAX_FIELDS} fields.") from None
    if found.containers > MAX_CONTAINERS or found.commas > MAX_ELEMENTS:
        raise InvalidRequestError(
            f"The body holds more than {MAX_CONTAINERS} arrays and objects, or more than {MAX_ELEMENTS} elements."
        )
    members = []
    for piece in found.pieces:
        key = _KEY.match(raw, piece.begin, piece.end)
        name = "" if key is None else key[1].decode("utf-8", "replace")
        members.append((name, piece, piece.begin if key is None else key.end()))
    return members


async def _token_lists(raw: bytes, name: str) -> PackedTokens | list[PackedTokens]:
    """A long list of token ids, or a list of such lists."""
    tokens = await _long_token_array(raw)
    if tokens is not None:
        return tokens
    try:
        lists = await cut(raw, 0, len(raw), most=MAX_CHOICES)
    except TooManyPiecesError:
        lists = None
    several = [] if lists is None else [raw[p.begin : p.end].strip() for p in lists.pieces]
    read = [await _long_token_array(one) for one in several]
    prompts = [one for one in read if one is not None]
    if raw[:1] != b"[" or not prompts or len(prompts) < len(read):
        raise InvalidRequestError(
            f"{name}: neither at most {MAX_PROMPT_TOKENS} token ids, nor at most {MAX_CHOICES} lists of so many.",
            param=name,
        )
    return prompts


async def _elements(
    raw: bytes, begin: int, end: int, name: str, schema: type[BaseModel]
) -> tuple[bytes, list[Any]]:
    """The JSON of a long list's first element, and all of them as `schema` has them."""
    end = begin + len(raw[begin:end].rstrip())
    if raw[begin : begin + 1] != b"[" or raw[end - 1 : end] != b"]":
        raise InvalidRequestError(f"{name}: Input should be a valid list", param=name)
    most = LONG_LISTS[name]
    try:
        pieces = (await cut(raw, begin, end, most=most)).pieces
    except TooManyPiecesError:
        raise InvalidRequestError(f"{name}: more than {most} elements.", param=name) from None
    heaviest = max(range(len(pieces)), key=lambda i: pieces[i].values)
    if pieces[heaviest].values > MAX_VALUES:
        param = f"{name}[{heaviest}]"
        raise InvalidRequestError(f"{param}: more than {MAX_VALUES} values.", param=param)
    elements: list[Any] = []
    for run in _runs(pieces):
        text = b"[" + raw[run[0].begin : run[-1].end] + b"]"
        try:
            elements += _list_type(schema, name).validate_json(text)
        except ValidationError as error:
            raise from_validation(error, within=name, offset=len(elements)) from None
        await asyncio.sleep(0)
    return raw[pieces[0].begin : pieces[0].end], elements


def _runs(pieces: Sequence[Piece]) -> list[Sequence[Piece]]:
    """Neighbours that are parsed together."""
    runs: list[Sequence[Piece]] = []
    begin, values = 0, 0
    for i, piece in enumerate(pieces):
        values += piece.values
        if values > _AT_ONCE or i == len(pieces) - 1:
            runs.append(pieces[begin : i + 1])
            begin, values = i + 1, 0
    return runs


@cache
def _list_type(schema: type[BaseModel], name: str) -> TypeAdapter[list[Any]]:
    field = schema.model_fields[name]
    kind: Any = (
        Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    )
    return TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False))


def _validated(raw: bytes, schema: type[_Body]) -> _Body:
    try:
        return schema.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation(error) from None

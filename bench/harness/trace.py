"""Request traces in Mooncake's format: a JSON object per line.

`{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [one id per 512-token block of the
prompt]}`; two requests with the same id at the same place share that block and all before it.
"""

from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec

from baton.errors import ConfigError

TRACE_BLOCK_TOKENS = 512


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRequest:
    """One request.

    Attributes:
        at_s: When it comes, from the beginning of the trace.
        input_tokens: Length of its prompt.
        output_tokens: Length of its output.
        blocks: What its prompt consists of.
    """

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]

    def tokens(self) -> tuple[int, ...]:
        """A prompt of that length whose blocks are equal exactly where the trace's are; ids below 256."""
        text = b"".join(block.to_bytes(8).ljust(TRACE_BLOCK_TOKENS, b"\0") for block in self.blocks)
        return tuple(text[: self.input_tokens].ljust(self.input_tokens, b"\1"))


def read_trace(path: Path, limit: int) -> list[TracedRequest]:
    """The first `limit` requests of the file.

    Raises:
        ConfigError: There is no request in it, or a line is not of this format.
        OSError: The file cannot be read.
    """
    decoder = msgspec.json.Decoder(_Line)
    requests = []
    with path.open("rb") as lines:
        for number, line in enumerate(islice(lines, limit), 1):
            try:
                requests.append(_request(decoder.decode(line)))
            except msgspec.DecodeError as error:
                raise ConfigError(f"{path}, line {number}: {error}", param="--trace") from error
    if not requests:
        raise ConfigError(f"{path}: no request is in this trace", param="--trace")
    return requests


def _request(line: _Line) -> TracedRequest:
    return TracedRequest(
        at_s=line.timestamp / 1000.0,
        input_tokens=max(1, line.input_length),
        output_tokens=max(1, line.output_length),
        blocks=tuple(line.hash_ids),
    )

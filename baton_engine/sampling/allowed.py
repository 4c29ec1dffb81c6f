"""Which tokens a request lets be drawn: those of its own list, where it has one,
and none that would complete a word it does not want.

All of it depends on the request and on the tokens drawn so far,
so that it is the same on every worker and after every retry.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from baton.generation import SamplingParams
from baton_engine.staging import StagedArray, StagedBatch


def completing_tokens(
    bad_words: Sequence[tuple[int, ...]], tokens: list[int], begin: int, end: int
) -> set[int]:
    """The tokens that would complete one of `bad_words` behind the output, which is `tokens[begin:end]`;
    as vLLM bans them.
    """
    return {
        last
        for *first, last in bad_words
        if len(first) <= end - begin and first == tokens[end - len(first) : end]
    }


def leaves_nothing(params: SamplingParams, banned: Set[int]) -> bool:
    """Whether all tokens of the request's own list are among `banned`."""
    allowed = params.allowed_token_ids
    # The list has no token twice: a shorter set cannot hold all of it.
    return 0 < len(allowed) <= len(banned) and banned >= set(allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedTokens:
    """The rows of a step that have a list of their own.

    Attributes:
        rows: `[num_listing]` int64, which rows of the scores these are.
        places: `[sum of their lists]` int64, flat places in the scores.
    """

    rows: StagedArray
    places: StagedArray


def collect_allowed(
    params: Sequence[SamplingParams], vocab_size: int, staged: StagedBatch
) -> AllowedTokens | None:
    """Gathers the lists of a step's rows; None where no row has one."""
    rows = [i for i, asked in enumerate(params) if asked.allowed_token_ids]
    if not rows:
        return None
    places = [_ids(params[i], vocab_size) + i * vocab_size for i in rows]
    return AllowedTokens(
        rows=staged.add(np.array(rows, np.int64)), places=staged.add(np.concatenate(places))
    )


def _ids(params: SamplingParams, vocab_size: int) -> NDArray[np.int64]:
    ids = np.frombuffer(params.allowed_token_ids.packed, "<u4").astype(np.int64)
    return ids[ids < vocab_size]


def keep_allowed(scores: torch.Tensor, allowed: AllowedTokens) -> None:
    """Sets all other scores of these rows to minus infinity, in place.

    Args:
        scores: `[num_rows, vocab]` float32.
        allowed: Arrived.
    """
    flat, places = scores.view(-1), allowed.places.tensor
    kept = flat[places]
    scores.index_fill_(0, allowed.rows.tensor, float("-inf"))
    flat[places] = kept

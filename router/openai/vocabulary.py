"""Token ids that clients name must be ones that the model knows."""

from collections.abc import Iterable

from baton.errors import InvalidRequestError
from baton.tokens import PackedTokens
from router.ports import ServedModel


def check_vocabulary(token_ids: Iterable[int], model: ServedModel, param: str) -> None:
    """Refuses ids that the model has no embedding for.

    Raises:
        InvalidRequestError: There is one.
    """
    highest = (
        token_ids.highest() if isinstance(token_ids, PackedTokens) else max(token_ids, default=0)
    )
    if highest >= model.vocab_size:
        raise InvalidRequestError(
            f"{param}: token {highest} is outside the vocabulary of {model.vocab_size}.",
            param=param,
        )

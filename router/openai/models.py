"""GET /v1/models: what is served."""

from starlette.requests import Request

from router.http.account import account_of
from router.openai.replies import ModelCard, ModelList
from router.openai.serving import Serving


async def model_list(request: Request, serving: Serving) -> ModelList:
    """All names by which this tenant may ask for the one model."""
    names = serving.names_for(account_of(request).tenant)
    return ModelList(data=[await _card(name, serving) for name in names])


async def model_card(name: str, request: Request, serving: Serving) -> ModelCard:
    """One name.

    Raises:
        ModelNotFoundError: It is not served, or not to this tenant.
    """
    return await _card(serving.require_name(name, account_of(request)), serving)


async def _card(name: str, serving: Serving) -> ModelCard:
    model = await serving.generator.model()
    return ModelCard(
        id=name,
        created=serving.created_s,
        root=serving.model_names[0],
        revision=serving.revision,
        max_model_len=None if model is None else model.max_model_len,
    )

"""GET /v1/models: the names under which the one model is served, for each tenant those that it may use."""

from starlette.requests import Request

from router.generation.model_catalog import ModelCatalog
from router.http.account import account_of
from router.openai.replies import ModelCard, ModelList


class Models:
    """The endpoints.

    Args:
        catalog: The served model.
        created_s: When serving began, Unix time.
        revision: The model's commit, if it has one.
    """

    def __init__(
        self, catalog: ModelCatalog, *, created_s: int, revision: str | None = None
    ) -> None:
        self._catalog = catalog
        self._created_s = created_s
        self._revision = revision

    async def list(self, request: Request) -> ModelList:
        """All names by which this tenant may ask for the model."""
        names = self._catalog.names_for(account_of(request).tenant)
        return ModelList(data=[await self._card(name) for name in names])

    async def card(self, name: str, request: Request) -> ModelCard:
        """One name.

        Raises:
            ModelNotFoundError: It is not served, or not to this tenant.
        """
        return await self._card(self._catalog.require_name(name, account_of(request)))

    async def _card(self, name: str) -> ModelCard:
        model = await self._catalog.known_model()
        return ModelCard(
            id=name,
            created=self._created_s,
            root=self._catalog.own_name,
            parent=self._catalog.own_name if self._catalog.adapter_of(name) else None,
            revision=self._revision,
            max_model_len=None if model is None else model.max_model_len,
        )

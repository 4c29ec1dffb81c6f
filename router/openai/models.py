"""GET /v1/models: the names under which the one model is served, for each tenant those that it may use."""

from starlette.requests import Request

from baton.errors import ModelNotFoundError, UnavailableError
from router.http.account import RequestAccount, account_of
from router.openai.replies import ModelCard, ModelList
from router.ports import Generator, ServedModel
from router.tenants.tenant import Tenant


class ModelCatalog:
    """The names of the served model, and what the workers say about it.

    Args:
        names: Names that clients may use; the first is the model's own.
        generator: Knows what the workers hold.
        created_s: When serving began, Unix time.
        revision: The model's commit, if it has one.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        generator: Generator,
        *,
        created_s: int,
        revision: str | None = None,
    ) -> None:
        self._names = names
        self._generator = generator
        self._created_s = created_s
        self._revision = revision

    def require_name(self, model: str | None, account: RequestAccount) -> str:
        """The name, if it is served, and to this tenant. One that is not on its list does not exist for it.

        Raises:
            ModelNotFoundError: It is missing or unknown.
        """
        if model is None:
            raise ModelNotFoundError("The request names no model.", param="model")
        if model not in self._names_for(account.tenant):
            raise ModelNotFoundError(f"The model `{model[:200]}` does not exist.", param="model")
        account.model = model
        return model

    async def require_model(self) -> ServedModel:
        """What the workers hold. A router that has just started waits for the first of them.

        Raises:
            UnavailableError: None has said so in time.
        """
        model = await self._generator.model(wait=True)
        if model is None:
            raise UnavailableError("No worker is ready yet.")
        return model

    async def list(self, request: Request) -> ModelList:
        """All names by which this tenant may ask for the model."""
        names = self._names_for(account_of(request).tenant)
        return ModelList(data=[await self._card(name) for name in names])

    async def card(self, name: str, request: Request) -> ModelCard:
        """One name.

        Raises:
            ModelNotFoundError: It is not served, or not to this tenant.
        """
        return await self._card(self.require_name(name, account_of(request)))

    def _names_for(self, tenant: Tenant) -> tuple[str, ...]:
        return tuple(name for name in self._names if tenant.may_use(name))

    async def _card(self, name: str) -> ModelCard:
        model = await self._generator.model()
        return ModelCard(
            id=name,
            created=self._created_s,
            root=self._names[0],
            revision=self._revision,
            max_model_len=None if model is None else model.max_model_len,
        )

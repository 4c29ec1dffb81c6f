"""The names under which the one model and its adapters are served, for each tenant those that it may use."""

from baton.errors import ModelNotFoundError, UnavailableError
from router.http.account import RequestAccount
from router.ports import Generator, ServedModel
from router.tenants.tenant import Tenant


class ModelCatalog:
    """The names of the served model and of its adapters, and what the workers say about it.

    Args:
        names: Names that clients may use for the model; the first is its own.
        generator: Knows what the workers hold.
        adapters: Names of LoRA adapters that clients may ask for in the model's place.

    Attributes:
        own_name: The model's own.
    """

    def __init__(
        self, names: tuple[str, ...], generator: Generator, adapters: tuple[str, ...] = ()
    ) -> None:
        self.own_name = names[0]
        self._names = (*names, *adapters)
        self._adapters = frozenset(adapters)
        self._generator = generator

    def names_for(self, tenant: Tenant) -> tuple[str, ...]:
        """The names that this tenant may use."""
        return tuple(name for name in self._names if tenant.may_use(name))

    def adapter_of(self, name: str) -> str:
        """The adapter that a name stands for; empty where it is the model's."""
        return name if name in self._adapters else ""

    def require_name(self, model: str | None, account: RequestAccount) -> str:
        """The name, if it is served, and to this tenant. One that is not on its list does not exist for it; a request
        that names none means the first one.

        Raises:
            ModelNotFoundError: It is unknown, or there is none for this tenant.
        """
        names = self.names_for(account.tenant)
        if not model and names:
            model = names[0]
        if model not in names:
            raise ModelNotFoundError(
                f"The model `{(model or '')[:200]}` does not exist.", param="model"
            )
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

    async def known_model(self) -> ServedModel | None:
        """The same without waiting; None until a worker has said it."""
        return await self._generator.model()

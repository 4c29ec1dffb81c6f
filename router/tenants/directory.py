"""The tenant that a request's credential belongs to, as of the last good tenants document.

A document becomes a `Register` as a whole, and the directory changes from one register to the next in one step: no
request ever sees half of a document.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

from baton.errors import AuthenticationError, UnavailableError
from router.tenants.document import TenantsDocument, tenant_of
from router.tenants.keys import KeyRing, hash_key, key_id
from router.tenants.tenant import ANONYMOUS, Caller, Tenant, TenantId
from router.tenants.web_tokens import WebTokens, looks_like_token, open_issuers

UNREAD = "The tenants document has not been read yet."
_MAX_CREDENTIAL = 8192


class Register:
    """All tenants with their keys. Immutable once made.

    Args:
        tenants: By id.
        keys: Digests of keys, each with its caller.
        tokens: Issuers of web tokens.
    """

    def __init__(
        self,
        *,
        tenants: Mapping[TenantId, Tenant],
        keys: Sequence[tuple[str, Caller]],
        tokens: WebTokens,
    ) -> None:
        self.tenants = tenants
        self._keys = KeyRing(keys)
        self._tokens = tokens

    @classmethod
    def of(
        cls,
        document: TenantsDocument,
        read_file: Callable[[str], str],
        simple_keys: Sequence[tuple[str, Caller]] = (),
    ) -> "Register":
        """The register of a checked document. Blocks while it reads key files.

        Args:
            document: The operator's.
            read_file: Gives the content of a file that the document names.
            simple_keys: Digests of keys that count besides those of the document.

        Raises:
            ConfigError: A key file cannot be read.
        """
        tenants: dict[TenantId, Tenant] = {}
        keys = list(simple_keys)
        for entry in document.tenants:
            tenant = tenant_of(entry, document.metrics_label)
            tenants[tenant.tenant_id] = tenant
            keys += [(key, Caller(tenant=tenant, key_id=key_id(key))) for key in entry.keys]
        return cls(tenants=tenants, keys=keys, tokens=open_issuers(document.jwt, read_file))

    def identify(self, credential: str) -> Caller:
        """Whose credential this is.

        Raises:
            AuthenticationError: It belongs to no tenant, or is no longer valid.
        """
        if len(self._tokens) and looks_like_token(credential):
            bearer = self._tokens.verify(credential)
            tenant = self.tenants.get(TenantId(bearer.tenant))
            if tenant is None:
                raise AuthenticationError("This token names a tenant that is not known.")
            return Caller(tenant=tenant, key_id=bearer.key_id)
        caller = self._keys.find(credential) if len(credential) <= _MAX_CREDENTIAL else None
        if caller is None:
            raise AuthenticationError("This API key is not known.")
        return caller


class TenantDirectory:
    """The register that holds now.

    Args:
        api_keys: Plain keys, without a document: a request with one belongs to the anonymous tenant.
        anonymous: That tenant; where there are neither keys nor a document, all requests belong to it.
        described: There is a tenants document. Until it has been read nobody is told that a key is wrong.
    """

    def __init__(
        self,
        api_keys: Sequence[str] = (),
        anonymous: Tenant = ANONYMOUS,
        *,
        described: bool = False,
    ) -> None:
        self._is_open = not api_keys and not described
        self._is_read = not described
        self._anonymous = Caller(tenant=anonymous)
        hashes = [hash_key(key) for key in api_keys]
        self._simple = [
            (key_hash, Caller(tenant=anonymous, key_id=key_id(key_hash))) for key_hash in hashes
        ]
        self._register = self.register_of(TenantsDocument(), _no_files)

    @property
    def is_read(self) -> bool:
        """Whether all that are to be let in are known: there is no document, or it has been read."""
        return self._is_read

    @property
    def tenants(self) -> Collection[Tenant]:
        """All that are known; the anonymous one if none is described."""
        return self._register.tenants.values() or (self._anonymous.tenant,)

    def register_of(self, document: TenantsDocument, read_file: Callable[[str], str]) -> Register:
        """The register of `document` with the simple keys besides. Blocks while it reads key files.

        Raises:
            ConfigError: A key file cannot be read.
        """
        return Register.of(document, read_file, self._simple)

    def replace(self, register: Register) -> None:
        """From now on `register` holds. Requests under way keep the tenant that they came in with."""
        self._register = register
        self._is_read = True

    def identify(self, credential: str | None) -> Caller:
        """Whose request this is.

        Args:
            credential: The key or token that came with it, if one did.

        Raises:
            AuthenticationError: One is needed, and this is none.
            UnavailableError: It may be one of a document that has not been read yet.
        """
        if self._is_open:
            return self._anonymous
        if not credential:
            raise AuthenticationError("An API key is needed: Authorization: Bearer KEY.")
        try:
            return self._register.identify(credential)
        except AuthenticationError:
            if not self._is_read:
                raise UnavailableError(UNREAD) from None
            raise


def _no_files(name: str) -> str:
    raise AssertionError(f"an empty document names no file, not {name}")

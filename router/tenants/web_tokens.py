"""JSON web tokens (RFC 7519) that name a tenant, verified with PyJWT: issuer, audience, expiry, algorithm, signature.

No key is ever fetched: an issuer's keys lie in files that the operator provides. Needs the `jwt` extra.
"""

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.errors import AuthenticationError, ConfigError
from router.tenants.document import IssuerEntry

MAX_TOKEN_CHARS = 8192
_REQUIRED = ["exp", "iss", "aud"]
_MAX_SUBJECT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Bearer:
    """What a good token says.

    Attributes:
        tenant: The value of its tenant claim.
        key_id: Names it in audit: `jwt:` and its subject, if it has one.
    """

    tenant: str
    key_id: str


class Issuer:
    """One issuer's keys, and what is demanded of its tokens.

    Args:
        entry: The operator's description, checked.
        key_text: Content of its JWKS or key file.

    Raises:
        ConfigError: PyJWT is not installed, or the keys cannot be read.
    """

    def __init__(self, entry: IssuerEntry, key_text: str) -> None:
        self.entry = entry
        self._jwt = _library()
        try:
            self._keys = self._read_keys(key_text)
        except (ValueError, TypeError, AttributeError, self._jwt.PyJWTError) as error:
            raise ConfigError(f"the keys of issuer {entry.issuer} cannot be read") from error

    def verify(self, token: str) -> Bearer:
        """What `token` says.

        Raises:
            AuthenticationError: It is not this issuer's, not for this audience, over, or not signed as it should be.
        """
        try:
            claims = self._jwt.decode(
                token,
                key=self._key_for(token),
                algorithms=list(self.entry.algorithms),
                issuer=self.entry.issuer,
                audience=self.entry.audience,
                leeway=self.entry.leeway_s,
                options={"require": _REQUIRED},
            )
        except self._jwt.ExpiredSignatureError:
            raise AuthenticationError("This token has expired.") from None
        except (self._jwt.PyJWTError, ValueError, TypeError):
            raise AuthenticationError("This token is not valid.") from None
        tenant = claims.get(self.entry.tenant_claim)
        if not isinstance(tenant, str):
            raise AuthenticationError(f"This token has no claim `{self.entry.tenant_claim}`.")
        return Bearer(tenant=tenant, key_id=_key_id(claims))

    def _read_keys(self, text: str) -> Mapping[str | None, Any]:
        """Keys by their `kid`; the only key of a file is also found without one."""
        if self.entry.key_file is not None:
            return {None: self._single_key(text)}
        keys = self._jwt.PyJWKSet.from_dict(json.loads(text)).keys
        found: dict[str | None, Any] = {key.key_id: key for key in keys}
        return found | {None: keys[0]} if len(keys) == 1 else found

    def _single_key(self, text: str) -> Any:
        for name in self.entry.algorithms:
            algorithm = self._jwt.get_algorithm_by_name(name)
            key = algorithm.prepare_key(text.strip().encode())
            if (problem := algorithm.check_key_length(key)) is not None:
                raise ConfigError(f"the key of issuer {self.entry.issuer}: {problem}")
        return key

    def _key_for(self, token: str) -> Any:
        kid = self._jwt.get_unverified_header(token).get("kid")
        name = None if self.entry.key_file is not None else kid
        if name not in self._keys:
            raise self._jwt.InvalidKeyError("no key of this id")
        return self._keys[name]


class WebTokens:
    """All issuers; each token is verified by the one that it claims to be from."""

    def __init__(self, issuers: Sequence[Issuer]) -> None:
        self._issuers = {issuer.entry.issuer: issuer for issuer in issuers}

    def __len__(self) -> int:
        return len(self._issuers)

    def verify(self, token: str) -> Bearer:
        """What `token` says.

        Raises:
            AuthenticationError: It is none of ours, or not valid.
        """
        if len(token) > MAX_TOKEN_CHARS:
            raise AuthenticationError("This token is too long.")
        issuer = self._issuers.get(_claimed_issuer(token))
        if issuer is None:
            raise AuthenticationError("This token is not valid.")
        return issuer.verify(token)


def looks_like_token(credential: str) -> bool:
    """Whether `credential` has a token's three parts. Our own API keys have no dots."""
    return credential.count(".") == 2


def open_issuers(entries: Sequence[IssuerEntry], read_file: Callable[[str], str]) -> WebTokens:
    """The issuers of a document.

    Args:
        entries: As they are written.
        read_file: Gives the content of a key file.

    Raises:
        ConfigError: A file or its keys cannot be read.
    """
    return WebTokens(
        [Issuer(entry, read_file(entry.jwks_file or entry.key_file or "")) for entry in entries]
    )


def _claimed_issuer(token: str) -> str:
    """`iss`, before anything is verified: only good for choosing the issuer that verifies."""
    library = _library()
    try:
        claims = library.decode(token, options={"verify_signature": False})
    except (library.PyJWTError, ValueError, TypeError, RecursionError):
        return ""
    issuer = claims.get("iss")
    return issuer if isinstance(issuer, str) else ""


def _key_id(claims: Mapping[str, Any]) -> str:
    """What can be written: JSON may hold half a surrogate pair."""
    subject = claims.get("sub")
    if not isinstance(subject, str):
        return "jwt"
    return "jwt:" + subject[:_MAX_SUBJECT].encode(errors="replace").decode()


def _library() -> Any:
    try:
        return importlib.import_module("jwt")
    except ImportError as error:
        raise ConfigError("JSON web tokens need PyJWT: pip install 'baton-serve[jwt]'") from error

"""JSON web tokens: what a good one says, and every way in which one is bad."""

import base64
import json
import time
from functools import cache
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from baton.errors import AuthenticationError, ConfigError
from router.tenants.document import IssuerEntry
from router.tenants.web_tokens import Issuer, WebTokens, open_issuers

SECRET = "0123456789abcdef" * 4


@cache
def private_key(name: str) -> ec.EllipticCurvePrivateKey:
    """One key per name for all tests."""
    return ec.generate_private_key(ec.SECP256R1())


def pem(name: str) -> str:
    return (
        private_key(name)
        .public_key()
        .public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        .decode()
    )


def jwks(*names: str) -> str:
    algorithm = jwt.get_algorithm_by_name("ES256")
    keys = [
        json.loads(algorithm.to_jwk(private_key(name).public_key())) | {"kid": name, "alg": "ES256"}
        for name in names
    ]
    return json.dumps({"keys": keys})


def token(name: str = "k1", *, headers: dict[str, Any] | None = None, **changes: Any) -> str:
    """A good token, but for `changes`; a claim of None is left out."""
    claims: dict[str, Any] = {
        "iss": "https://login.example",
        "aud": "baton",
        "exp": time.time() + 600,
        "sub": "someone",
        "tenant": "acme",
    }
    kept = {key: value for key, value in (claims | changes).items() if value is not None}
    secret = private_key(name).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return jwt.encode(kept, secret, "ES256", headers=headers or {"kid": name})


def tokens(**changes: Any) -> WebTokens:
    fields: dict[str, Any] = {
        "issuer": "https://login.example",
        "audience": "baton",
        "algorithms": ("ES256",),
        "jwks_file": "jwks.json",
    }
    files = {"jwks.json": jwks("k1", "k2"), "key.pem": pem("k1"), "secret": SECRET}
    return open_issuers([IssuerEntry(**(fields | changes))], files.__getitem__)


def test_a_good_token_names_its_tenant_and_its_subject():
    bearer = tokens().verify(token())
    assert (bearer.tenant, bearer.key_id) == ("acme", "jwt:someone")


def test_a_subject_that_is_no_text_is_named_by_what_of_it_can_be_written():
    assert tokens().verify(token(sub="a\ud800b")).key_id == "jwt:a?b"


def test_the_key_is_found_by_its_id():
    assert tokens().verify(token("k2")).tenant == "acme"


def test_a_single_key_needs_no_id():
    by_file = tokens(jwks_file=None, key_file="key.pem")
    assert by_file.verify(token(headers={"kid": "whatever"})).tenant == "acme"


def test_a_shared_secret_works_where_the_operator_wants_it():
    issuer = tokens(jwks_file=None, key_file="secret", algorithms=("HS256",))
    claims = jwt.decode(token(), options={"verify_signature": False})
    assert issuer.verify(jwt.encode(claims, SECRET, "HS256")).tenant == "acme"


@pytest.mark.parametrize(
    "changes",
    [
        {"iss": "https://evil.example"},
        {"iss": None},
        {"aud": "another"},
        {"aud": None},
        {"exp": None},
        {"exp": 1},
        {"nbf": 2**40},
        {"tenant": None},
        {"tenant": 7},
    ],
    ids=str,
)
def test_a_claim_that_is_missing_or_wrong_keeps_its_bearer_out(changes: dict[str, Any]):
    with pytest.raises(AuthenticationError):
        tokens().verify(token(**changes))


def test_a_token_signed_with_a_key_that_is_not_the_issuers_is_refused():
    with pytest.raises(AuthenticationError):
        tokens().verify(token("stranger", headers={"kid": "k1"}))
    with pytest.raises(AuthenticationError):
        tokens().verify(token("stranger"))


def test_an_unsigned_token_is_refused():
    claims = jwt.decode(token(), options={"verify_signature": False})
    with pytest.raises(AuthenticationError):
        tokens().verify(jwt.encode(claims, "", "none", headers={"kid": "k1"}))


def test_a_public_key_is_never_taken_for_a_shared_secret():
    """The classic confusion of algorithms: HS256 with the text of the public key as its secret."""
    head = base64.urlsafe_b64encode(b'{"alg":"HS256","kid":"k1"}').rstrip(b"=")
    body = token().split(".")[1].encode()
    signature = jwt.get_algorithm_by_name("HS256").sign(head + b"." + body, pem("k1").encode())
    forged = b".".join((head, body, base64.urlsafe_b64encode(signature).rstrip(b"="))).decode()
    with pytest.raises(AuthenticationError):
        tokens().verify(forged)
    with pytest.raises(AuthenticationError):
        tokens(jwks_file=None, key_file="key.pem").verify(forged)


@pytest.mark.parametrize(
    "garbage", ["..", "a.b.c", "é.é.é", "." * 2 + "x" * 100_000, "e30.e30.e30"]
)
def test_garbage_is_refused_calmly(garbage: str):
    with pytest.raises(AuthenticationError):
        tokens().verify(garbage)


def test_a_short_secret_is_the_operators_mistake():
    entry = IssuerEntry(issuer="i", audience="a", algorithms=("HS256",), key_file="short")
    with pytest.raises(ConfigError, match="issuer i"):
        Issuer(entry, "hunter2")


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"keys": []}', "not json"])
def test_a_jwks_file_that_holds_no_keys_is_the_operators_mistake(content: str):
    entry = IssuerEntry(issuer="i", audience="a", jwks_file="jwks.json")
    with pytest.raises(ConfigError, match="keys of issuer i"):
        Issuer(entry, content)

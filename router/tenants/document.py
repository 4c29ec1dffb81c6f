"""The tenants document: what the operator writes, read strictly, each error with the place of the value at fault.

metrics_label: class            # or `tenant`: one label value per tenant, for installations with few of them
tenants:
  - id: acme
    keys: [sha256:9f86…]        # `baton tenants new-key` makes one
    weight: 2
    slo_class: interactive
    requests_per_minute: 600
    tokens_per_minute: 200000
    max_concurrency: 32
    kv_bytes: 64GiB
    models: [baton-demo]
    share_cache: acme-group     # tenants that name the same group share prefixes; alone by default
jwt:
  - issuer: https://login.example
    audience: baton
    algorithms: [RS256]
    jwks_file: jwks.json        # or key_file: a PEM, or the secret of an HS algorithm
    tenant_claim: tenant
"""

import re
from collections.abc import Iterator
from typing import Literal

import msgspec
import yaml

from baton.config.sizes import parse_size
from baton.config.yaml_text import read_yaml
from baton.errors import ConfigError, first_line
from router.tenants.keys import is_hash
from router.tenants.tenant import DEFAULT_SLO_CLASS, Tenant, TenantId, TenantLimits

MAX_WEIGHT = 1000.0
_MOST = 10**12
"""Of a limit; what is to have none leaves it out. Counts in Redis, and figures of the pool, are within bounds, too."""
_LEAST_RATE = 1e-6
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SYMMETRIC = frozenset({"HS256", "HS384", "HS512"})
_ASYMMETRIC = frozenset(
    {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"}
)


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the document; unknown fields are errors."""


class TenantEntry(_Strict, frozen=True, kw_only=True):
    """One tenant as it is written; see `Tenant` and `TenantLimits` for what the fields mean."""

    id: str
    keys: tuple[str, ...] = ()
    weight: float = 1.0
    slo_class: str = DEFAULT_SLO_CLASS
    requests_per_minute: float | None = None
    request_burst: float | None = None
    tokens_per_minute: float | None = None
    token_burst: float | None = None
    max_concurrency: int | None = None
    kv_bytes: int | str | None = None
    models: tuple[str, ...] | None = None
    share_cache: str | None = None
    audit_content: bool = False
    admin: bool = False


class IssuerEntry(_Strict, frozen=True, kw_only=True):
    """One issuer of JSON web tokens.

    Attributes:
        issuer: What `iss` must be.
        audience: What `aud` must hold.
        algorithms: Those allowed; all with a secret, or all with a public key.
        jwks_file: File with the issuer's public keys (JWKS).
        key_file: File with its one key: PEM, or the secret.
        tenant_claim: The claim that names the tenant.
        leeway_s: How far the clocks may be apart.
    """

    issuer: str
    audience: str
    algorithms: tuple[str, ...] = ("RS256",)
    jwks_file: str | None = None
    key_file: str | None = None
    tenant_claim: str = "tenant"
    leeway_s: float = 10.0


class TenantsDocument(_Strict, frozen=True, kw_only=True):
    """The whole document."""

    tenants: tuple[TenantEntry, ...] = ()
    jwt: tuple[IssuerEntry, ...] = ()
    metrics_label: Literal["class", "tenant"] = "class"


def parse(text: str, source: str) -> TenantsDocument:
    """Reads and checks a document. Blocks for as long as its length takes.

    Args:
        text: YAML.
        source: How errors name it: a path, or a key of Redis.

    Raises:
        ConfigError: It is empty, as a file whose writer failed, or not YAML, or something in it is unknown, of the
            wrong type, out of range or there twice.
    """
    try:
        content = read_yaml(text)
        if content is None:
            raise ConfigError(f"{source}: empty; a document without tenants says `tenants: []`")
        document = msgspec.convert(content, TenantsDocument)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: {_yaml_problem(error)}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {_readable(error)}") from error
    for path, problem in _problems(document):
        raise ConfigError(f"{source}: {path}: {problem}", param=path)
    return document


def tenant_of(entry: TenantEntry, metrics_label: str) -> Tenant:
    """The tenant that a checked entry describes."""
    own = f"tenant:{entry.id}"
    return Tenant(
        tenant_id=TenantId(entry.id),
        weight=entry.weight,
        slo_class=entry.slo_class,
        tenant_class=entry.id if metrics_label == "tenant" else entry.slo_class,
        limits=TenantLimits(
            requests_per_minute=entry.requests_per_minute,
            request_burst=entry.request_burst,
            tokens_per_minute=entry.tokens_per_minute,
            token_burst=entry.token_burst,
            max_concurrency=entry.max_concurrency,
        ),
        kv_bytes=_size(entry.kv_bytes),
        models=None if entry.models is None else frozenset(entry.models),
        cache_scope=own if entry.share_cache is None else f"shared:{entry.share_cache}",
        audit_content=entry.audit_content,
        admin=entry.admin,
    )


def _size(given: int | str | None) -> int | None:
    return parse_size(given) if isinstance(given, str) else given


def _yaml_problem(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return first_line(error)


def _readable(error: msgspec.ValidationError) -> str:
    """`tenants[0].weight: expected float, got str` from msgspec's own words."""
    problem, _, path = str(error).partition(" - at ")
    problem = problem.replace("`", "")
    problem = problem[:1].lower() + problem[1:]
    place = path.strip("`").removeprefix("$").removeprefix(".")
    return f"{place}: {problem}" if place else problem


def _problems(document: TenantsDocument) -> Iterator[tuple[str, str]]:
    """Each value that its type alone does not rule out, by its path."""
    ids: dict[str, str] = {}
    keys: dict[str, str] = {}
    for index, entry in enumerate(document.tenants):
        path = f"tenants[{index}]"
        if entry.id in ids:
            yield f"{path}.id", f"{entry.id} is the id of {ids[entry.id]} already"
        ids[entry.id] = path
        for number, key in enumerate(entry.keys):
            place = f"{path}.keys[{number}]"
            if not is_hash(key):
                # The text is not repeated: it may be a key itself.
                yield place, "must be sha256: and 64 hexadecimal digits (`baton tenants hash-key`)"
            if key in keys:
                yield place, f"is the key of {keys[key]} already"
            keys[key] = path
        for name, problem in _tenant_problems(entry):
            yield f"{path}.{name}", problem
    issuers: dict[str, str] = {}
    for index, issuer in enumerate(document.jwt):
        if issuer.issuer in issuers:
            yield f"jwt[{index}].issuer", f"is that of {issuers[issuer.issuer]} already"
        issuers[issuer.issuer] = f"jwt[{index}]"
        for name, problem in _issuer_problems(issuer):
            yield f"jwt[{index}].{name}", problem


def _tenant_problems(entry: TenantEntry) -> Iterator[tuple[str, str]]:
    for name, text in (
        ("id", entry.id),
        ("slo_class", entry.slo_class),
        ("share_cache", entry.share_cache),
    ):
        if text is not None and not _NAME.fullmatch(text):
            yield name, "must be 1 to 64 letters, digits, '.', '_' or '-'"
    if not 0 < entry.weight <= MAX_WEIGHT:
        yield "weight", f"must be above 0 and at most {MAX_WEIGHT:.0f}"
    for name, rate in (
        ("requests_per_minute", entry.requests_per_minute),
        ("tokens_per_minute", entry.tokens_per_minute),
    ):
        if rate is not None and not _LEAST_RATE <= rate <= _MOST:
            yield name, f"must be from {_LEAST_RATE:.6f} to {_MOST}; no limit where it is left out"
    for name, count in (
        ("request_burst", entry.request_burst),
        ("token_burst", entry.token_burst),
        ("max_concurrency", entry.max_concurrency),
    ):
        if count is not None and not 1 <= count <= _MOST:
            yield name, f"must be from 1 to {_MOST}"
    if entry.request_burst is not None and entry.requests_per_minute is None:
        yield "request_burst", "needs requests_per_minute"
    if entry.token_burst is not None and entry.tokens_per_minute is None:
        yield "token_burst", "needs tokens_per_minute"
    if entry.kv_bytes is not None and not 1 <= (_size(entry.kv_bytes) or 0) < 1 << 63:
        yield "kv_bytes", "must be a size such as 64GiB, below 8388608TiB"


def _issuer_problems(issuer: IssuerEntry) -> Iterator[tuple[str, str]]:
    for name in ("issuer", "audience", "tenant_claim"):
        if not getattr(issuer, name):
            yield name, "must not be empty"
    allowed = set(issuer.algorithms)
    if not allowed or not (allowed <= _SYMMETRIC or allowed <= _ASYMMETRIC):
        known = ", ".join(sorted(_SYMMETRIC)), ", ".join(sorted(_ASYMMETRIC))
        yield "algorithms", f"must be some of {known[0]}, or some of {known[1]}"
    if (issuer.jwks_file is None) == (issuer.key_file is None):
        yield "jwks_file", "exactly one of jwks_file and key_file is needed"
    if issuer.jwks_file is not None and allowed <= _SYMMETRIC:
        yield "algorithms", "must be of public keys: a JWKS file holds no secrets"
    if not 0 <= issuer.leeway_s <= 300:
        yield "leeway_s", "must be from 0 to 300"

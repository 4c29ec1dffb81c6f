"""The key or token that came with a request."""

from starlette.datastructures import Headers


def credential_of(headers: Headers) -> str | None:
    """That of `Authorization: Bearer`, or of `x-api-key`, which Anthropic's clients send; None if there is none."""
    scheme, _, credential = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and credential.strip():
        return credential.strip()
    return headers.get("x-api-key", "").strip() or None

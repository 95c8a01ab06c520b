"""Reads a request's API key: a bearer token, or the `x-api-key` header of Anthropic's clients."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from gateway.protocol.errors import Failure, GatewayError

KEY_HEADER = "x-api-key"


def key_digest(key: str) -> bytes:
    """Return the SHA-256 digest of an API key.

    Keys are looked up by digest, so that the time of a lookup reveals nothing about them.
    """
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def digest_of_headers(headers: Mapping[str, str]) -> bytes:
    """Return the digest of the API key in a request's headers. The key may be invalid.

    Raises GatewayError (401) if there is no key, or if there are two different keys: it would be
    unclear which tenant sends the request.
    """
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    bearer = bearer.strip() if scheme.lower() == "bearer" else ""
    key = headers.get(KEY_HEADER, "").strip() or bearer
    if not key:
        raise wrong_key()
    if bearer and bearer != key:
        message = f"Two different API keys provided, in 'Authorization' and '{KEY_HEADER}'."
        raise GatewayError(Failure.BAD_KEY, message)
    return key_digest(key)


def wrong_key() -> GatewayError:
    """Return the error (401) for an API key that is missing or belongs to no tenant."""
    return GatewayError(
        Failure.BAD_KEY,
        f"Incorrect API key provided: send 'Authorization: Bearer <key>' or '{KEY_HEADER}: <key>'.",
    )

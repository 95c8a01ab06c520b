"""The API key of a request: a bearer token, or the header of Anthropic's clients."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from gateway.protocol.errors import Failure, GatewayError

KEY_HEADER = "x-api-key"


def key_digest(key: str) -> bytes:
    """Return the SHA-256 of a key, by which it is looked up without comparing its characters."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def digest_of_headers(headers: Mapping[str, str]) -> bytes:
    """Return the digest of a request's key, whether or not it is valid.

    Raises GatewayError (401) without a key, or with two different ones: which tenant sends the
    request would then depend on the order in which they are read.
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
    """Create the error for a key that is missing or belongs to no tenant."""
    return GatewayError(
        Failure.BAD_KEY,
        f"Incorrect API key provided: send 'Authorization: Bearer <key>' or '{KEY_HEADER}: <key>'.",
    )

"""Ids of responses that lead back to the engine that keeps them, without any table.

An id is a random number, a code and perhaps a model name. The code is an HMAC over the number, the
endpoint and the name, with a key of the tenant: a gateway with the key finds the endpoint by
computing the codes of all endpoints. Gateways with the same configuration have the same keys. An
id of another tenant, an invented one and one of a removed endpoint cannot be told apart.
"""

from __future__ import annotations

import binascii
import hmac
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gateway.config import Config
from gateway.protocol.cache_salts import derived_secret, shared_secret

PREFIX = "resp_"
MAX_ID_CHARS = 256
_NUMBER_BYTES, _CODE_BYTES = 12, 16
_MAX_NAME_BYTES = 64  # as many as one SHA-512 can hide
_LABEL = b"penstock response id 1"


class KeptResponse(NamedTuple):
    """Where a response is kept: the endpoint's name, and the model's name as the client gave it.

    The model is "" if engines use the same name.
    """

    endpoint: str
    model: str


class ResponseIds:
    """Creates and reads the ids of one configuration. Immutable."""

    __slots__ = ("_keys", "_open_key")

    def __init__(self, keys: Mapping[str, bytes], open_key: bytes) -> None:
        """Initialize with HMAC keys by tenant; `open_key` is for requests without a tenant."""
        self._keys = keys
        self._open_key = open_key

    def new(self, tenant: str, endpoint: str, model: str = "") -> str:
        """Create the id of a response that the endpoint will keep. See KeptResponse for `model`."""
        key, number = self._key(tenant), secrets.token_bytes(_NUMBER_BYTES)
        name = model.encode("utf-8", "surrogatepass")
        hidden = _mask(key, number, name) if len(name) <= _MAX_NAME_BYTES else b""
        sealed = number + _code(key, number, endpoint, hidden) + hidden
        return PREFIX + urlsafe_b64encode(sealed).rstrip(b"=").decode()

    def find(self, response_id: str, tenant: str, endpoints: Iterable[str]) -> KeptResponse | None:
        """Return where a response is kept; None for an id of another tenant or endpoint."""
        sealed = _decoded(response_id)
        if sealed is None:
            return None
        key, number = self._key(tenant), sealed[:_NUMBER_BYTES]
        code, hidden = sealed[_NUMBER_BYTES:][:_CODE_BYTES], sealed[_NUMBER_BYTES + _CODE_BYTES :]
        for endpoint in endpoints:
            if hmac.compare_digest(code, _code(key, number, endpoint, hidden)):
                return KeptResponse(endpoint, _mask(key, number, hidden).decode("utf-8", "replace"))
        return None

    def _key(self, tenant: str) -> bytes:
        return self._keys.get(tenant, self._open_key)


def new_response_ids(config: Config) -> ResponseIds:
    """Create the ids of a configuration.

    The secret is that of cache salts: `cache.secret`, else the key that the gateways share. Without
    both, each tenant's is derived from its API key.
    """
    secret = shared_secret(config)
    keys = {
        tenant.name: hmac.digest(
            secret or derived_secret([tenant]), _LABEL + tenant.name.encode(), "sha256"
        )
        for tenant in config.tenants
    }
    return ResponseIds(keys, hmac.digest(secret or _LABEL, _LABEL, "sha256"))


def _decoded(response_id: str) -> bytes | None:
    """Return the bytes of an id; None if it has not the form of one."""
    if not response_id.startswith(PREFIX) or len(response_id) > MAX_ID_CHARS:
        return None
    text = response_id[len(PREFIX) :]
    try:
        sealed = urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (binascii.Error, ValueError):
        return None
    is_whole = len(sealed) >= _NUMBER_BYTES + _CODE_BYTES
    is_canonical = urlsafe_b64encode(sealed).rstrip(b"=").decode() == text
    return sealed if is_whole and is_canonical else None


def _code(key: bytes, number: bytes, endpoint: str, hidden: bytes) -> bytes:
    text = b"%b\0%b\0%b" % (number, endpoint.encode(), hidden)
    return hmac.digest(key, text, "sha256")[:_CODE_BYTES]


def _mask(key: bytes, number: bytes, name: bytes) -> bytes:
    """Hide a name, or show it again."""
    stream = hmac.digest(key, b"name" + number, "sha512")
    return bytes(a ^ b for a, b in zip(name, stream, strict=False))

"""Ids of stored responses that show the gateway which engine stores them, without a table.

An id consists of three parts:

- A number. Its first half is copied from the id of the previous response, so all responses of a
  conversation share that half. The rest is random.
- A code: an HMAC over the number, the endpoint and the model name, with a key per tenant.
- The model name, encrypted.

A gateway with the key finds the endpoint by computing the codes of all endpoints. Gateways with the
same configuration have the same keys. An id of another tenant, an invented id, and an id of a
removed endpoint cannot be distinguished.
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Collection, Mapping
from typing import NamedTuple

from gateway.config import Config
from gateway.protocol.derived_secrets import derived_secret, other_shared_secret, shared_secret

PREFIX = "resp_"
MAX_ID_CHARS = 256
_NUMBER_BYTES, _CODE_BYTES = 12, 16
_CONVERSATION_BYTES = 6  # the first bytes of the number
_MAX_NAME_BYTES = 160  # a longer id would exceed MAX_ID_CHARS
_LABEL = b"penstock response id 1"


class KeptResponse(NamedTuple):
    """Where a response is stored: the endpoint's name, and the client's name of the model.

    The model is "" if its name is too long for an id.
    """

    endpoint: str
    model: str


class ResponseIds:
    """Creates ids of stored responses that contain where each is stored, and reads such ids.

    The ids depend on the keys of one configuration. Immutable.
    """

    __slots__ = ("_keys", "_open_key", "_others")

    def __init__(
        self, keys: Mapping[str, bytes], open_key: bytes, others: ResponseIds | None = None
    ) -> None:
        """Create the ids of a configuration.

        keys      HMAC key by tenant
        open_key  HMAC key for requests without a tenant
        others    finds ids that gateways with a different key have created
        """
        self._keys = keys
        self._open_key = open_key
        self._others = others

    def new(self, tenant: str, endpoint: str, model: str, previous: str = "") -> str:
        """Return a new id for a response that `endpoint` will store.

        tenant    the tenant that the response belongs to
        endpoint  the endpoint that will store the response
        model     the client's name of the model
        previous  the id of the response that this one continues, or ""
        """
        key, number = self._key(tenant), secrets.token_bytes(_NUMBER_BYTES)
        if (before := _decoded(previous)) is not None:
            number = before[:_CONVERSATION_BYTES] + number[_CONVERSATION_BYTES:]
        name = model.encode("utf-8", "surrogatepass")
        hidden = _mask(key, number, name) if len(name) <= _MAX_NAME_BYTES else b""
        sealed = number + _code(key, number, endpoint, hidden) + hidden
        return PREFIX + urlsafe_b64encode(sealed).rstrip(b"=").decode()

    def find(
        self, response_id: str, tenant: str, endpoints: Collection[str]
    ) -> KeptResponse | None:
        """Return where a response is stored; None if none of these endpoints stores it.

        Returns None also for the id of another tenant's response.
        """
        sealed = _decoded(response_id)
        if sealed is None:
            return None
        key, number = self._key(tenant), sealed[:_NUMBER_BYTES]
        code, hidden = sealed[_NUMBER_BYTES:][:_CODE_BYTES], sealed[_NUMBER_BYTES + _CODE_BYTES :]
        for endpoint in endpoints:
            if hmac.compare_digest(code, _code(key, number, endpoint, hidden)):
                return KeptResponse(endpoint, _mask(key, number, hidden).decode("utf-8", "replace"))
        others = self._others
        return None if others is None else others.find(response_id, tenant, endpoints)

    def _key(self, tenant: str) -> bytes:
        return self._keys.get(tenant, self._open_key)


def conversation_of(response_id: str) -> str:
    """Return the part that all response ids of a conversation share; "" if the text is no such id.

    A client may have invented the id. Therefore the result identifies a conversation but grants no
    access.
    """
    sealed = _decoded(response_id)
    return "" if sealed is None else sealed[:_CONVERSATION_BYTES].hex()


def new_response_ids(config: Config) -> ResponseIds:
    """Create the ResponseIds of a configuration.

    The secret is that of cache salts: `cache.secret`, else the key that the gateways share. Without
    both, each tenant's secret is derived from its API keys. Ids that were created with
    `shared.other_key` are found too.
    """
    other = other_shared_secret(config)
    others = None if other is None else _with_secret(config, other)
    return _with_secret(config, shared_secret(config), others)


def _with_secret(
    config: Config, secret: bytes | None, others: ResponseIds | None = None
) -> ResponseIds:
    keys = {
        tenant.name: hmac.digest(
            secret or derived_secret([tenant]), _LABEL + tenant.name.encode(), "sha256"
        )
        for tenant in config.tenants
    }
    return ResponseIds(keys, hmac.digest(secret or _LABEL, _LABEL, "sha256"), others)


def _decoded(response_id: str) -> bytes | None:
    # Return the bytes that a response id encodes, or None if the text is not a response id.
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
    # Encrypt a name with a key stream, or decrypt an encrypted one (XOR does both).
    secret = hmac.digest(key, b"name" + number, "sha256")
    stream = hashlib.shake_256(secret).digest(len(name))
    return bytes(a ^ b for a, b in zip(name, stream, strict=False))

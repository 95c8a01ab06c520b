"""Cache salts: values that determine which requests may share cached prompts on an engine.

A salt is HMAC-SHA256 over the salt that the client sent, with a key per tenant or group of tenants.
Therefore clients can divide their own cache, but cannot use that of another tenant. Gateways with
the same configuration compute the same salts, also after a restart (docs/decisions/0014). The
request member that contains the salt is chosen in config/tenant_rules.py.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence

import msgspec

from gateway.config import Config, Tenant
from gateway.protocol.derived_secrets import SALT_LABEL, derived_secret, shared_secret
from gateway.protocol.errors import Failure, GatewayError
from gateway.protocol.request.json_members import member_value

MAX_CLIENT_SALT = 1024
CLIENT_SALT_MEMBERS = ("cache_salt", "extra_key")
"""Members that engines do not get, but whose values become part of the salt."""


class CacheSalts:
    """Computes cache salts: only requests with equal salts share cached prompts on an engine.

    The object belongs to one configuration, and is immutable.

    defaults  salt (hex) by tenant, for requests whose clients send none; only tenants whose cache
              is isolated have one
    """

    __slots__ = ("_keys", "_open_key", "defaults")

    def __init__(self, keys: Mapping[str, bytes], open_key: bytes) -> None:
        """Create the salts of a configuration.

        keys      HMAC key by tenant
        open_key  HMAC key for all other requests
        """
        self._keys = keys
        self._open_key = open_key
        self.defaults = {tenant: _hex(key, b"") for tenant, key in keys.items()}

    def client_salt(self, tenant: str, client_salt: bytes) -> bytes:
        """Return the cache salt for a request of `tenant`, derived from the salt of its client.

        The result is hexadecimal. Tenants that send the same salt get different results.
        """
        return _hex(self._keys.get(tenant, self._open_key), client_salt)

    def request_salt(self, tenant: str, members: Mapping[str, msgspec.Raw]) -> bytes:
        """Return the cache salt (hex) of a request with these members; b"" if it has none.

        If the client sent a salt, the result is derived from it. Raises GatewayError if the
        client's salt is invalid.
        """
        client_salt = _client_salt(members)
        return (
            self.client_salt(tenant, client_salt) if client_salt else self.defaults.get(tenant, b"")
        )


def new_cache_salts(config: Config) -> CacheSalts:
    """Create the CacheSalts of a configuration.

    The secret is `cache.secret`, else the key that the gateways share. Without both, each tenant's
    or group's secret is derived from its API keys. In each case it is equal on all gateways and
    after a restart.
    """
    secret = shared_secret(config)
    open_key = hmac.digest(secret or SALT_LABEL, b"no tenant", "sha256")
    if config.cache.isolate == "off":
        return CacheSalts({}, open_key)
    keys: dict[str, bytes] = {}
    for domain, tenants in group_by_domain(config.tenants).items():
        key = hmac.digest(secret or derived_secret(tenants), domain, "sha256")
        keys.update(dict.fromkeys((tenant.name for tenant in tenants), key))
    return CacheSalts(keys, open_key)


def group_by_domain(tenants: Sequence[Tenant]) -> dict[bytes, list[Tenant]]:
    """Group the tenants into those that share cached prompts with each other.

    The key of a group is `group NAME` for tenants with a cache group, else `tenant NAME`, as bytes.
    """
    groups: dict[bytes, list[Tenant]] = {}
    for tenant in tenants:
        group = tenant.cache_group
        domain = f"tenant {tenant.name}" if group is None else f"group {group}"
        groups.setdefault(domain.encode(), []).append(tenant)
    return groups


def _hex(key: bytes, client_salt: bytes) -> bytes:
    return hmac.digest(key, client_salt, "sha256").hex().encode()


def _client_salt(members: Mapping[str, msgspec.Raw]) -> bytes:
    # Return the salts that the client sent in one canonical encoding, or b"" if it sent none.
    salts = [_salt_text(members, name) if name in members else None for name in CLIENT_SALT_MEMBERS]
    return msgspec.json.encode(salts) if any(salts) else b""


def _salt_text(members: Mapping[str, msgspec.Raw], name: str) -> str | None:
    value = member_value(members, name)
    if value is not None and (
        not isinstance(value, str) or not value or len(value) > MAX_CLIENT_SALT
    ):
        message = f"'{name}' must be a string of 1 to {MAX_CLIENT_SALT} characters."
        raise GatewayError(Failure.BAD_REQUEST, message, param=name)
    return value

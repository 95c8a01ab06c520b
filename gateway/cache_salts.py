"""Cache salts: which requests may share cached prompts on an engine.

A salt is HMAC-SHA256 under a key of the tenant (or of the group it shares with), over the salt that
the client sent. So a client can divide its own cache and cannot reach another tenant's. Gateways with
the same configuration have the same salts, after a restart too (docs/decisions/0014). Not here: the
request member that carries it (gateway/config/isolation.py).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from gateway.config import Config, Tenant

MAX_CLIENT_SALT = 1024
_LABEL = b"penstock cache salt 1"


class CacheSalts:
    """The salts of one configuration. Never changes.

    usual  the salt of a tenant's requests without a salt of the client's; none for tenants that are not isolated
    """

    __slots__ = ("_keys", "_open_key", "usual")

    def __init__(self, keys: Mapping[str, bytes], open_key: bytes) -> None:
        """`keys`: HMAC key by tenant. `open_key`: of requests of no tenant, and of tenants that are not isolated."""
        self._keys = keys
        self._open_key = open_key
        self.usual = {tenant: _hex(key, b"") for tenant, key in keys.items()}

    def salt(self, tenant: str, client_salt: bytes) -> bytes:
        """The salt, as hex, of a request with a salt of the client's."""
        return _hex(self._keys.get(tenant, self._open_key), client_salt)


def cache_salts(config: Config) -> CacheSalts:
    """The salts of this configuration.

    Their secret is `cache.secret`, else the key that the gateways share. Without both, each tenant's or group's is
    derived from the API keys of its tenants: equal on all gateways and after a restart, without a step to take.
    """
    secret = _secret(config)
    open_key = hmac.digest(secret or _LABEL, b"no tenant", "sha256")
    if config.cache.isolate == "off":
        return CacheSalts({}, open_key)
    keys: dict[str, bytes] = {}
    for domain, tenants in domains(config.tenants).items():
        key = hmac.digest(secret or _derived(tenants), domain, "sha256")
        keys.update(dict.fromkeys((tenant.name for tenant in tenants), key))
    return CacheSalts(keys, open_key)


def domains(tenants: Sequence[Tenant]) -> dict[bytes, list[Tenant]]:
    """The tenants that share cached prompts, by a name for them that no other domain has."""
    found: dict[bytes, list[Tenant]] = {}
    for tenant in tenants:
        group = tenant.cache_group
        domain = f"tenant {tenant.name}" if group is None else f"group {group}"
        found.setdefault(domain.encode(), []).append(tenant)
    return found


def _secret(config: Config) -> bytes | None:
    if config.cache.secret is not None:
        return config.cache.secret.reveal().encode()
    if config.shared is not None:
        return hmac.digest(config.shared.key.reveal().encode(), _LABEL, "sha256")
    return None


def _derived(tenants: Sequence[Tenant]) -> bytes:
    """A secret that only these tenants' API keys decide: other tenants may come and go."""
    digests = sorted(hashlib.sha256(tenant.key.reveal().encode()).digest() for tenant in tenants)
    return hmac.digest(_LABEL, b"".join(digests), "sha256")


def _hex(key: bytes, client_salt: bytes) -> bytes:
    return hmac.digest(key, client_salt, "sha256").hex().encode()

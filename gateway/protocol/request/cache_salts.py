"""Cache salts: values that determine which requests may share cached prompts on an engine.

A salt is HMAC-SHA256 over the salt that the client sent, with a key per tenant or group of tenants.
Therefore clients can divide their own cache, but cannot use that of another tenant. Gateways with
the same configuration compute the same salts, also after a restart (docs/decisions/0014). The
request member that contains the salt is chosen in config/tenant_rules.py.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from gateway.config import Config, Tenant
from gateway.config.values import Secret

MAX_CLIENT_SALT = 1024
_LABEL = b"penstock cache salt 1"


class CacheSalts:
    """Computes the cache salts of one configuration. Immutable.

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
        """Return the cache salt (hex) for a request of `tenant` whose client sent `client_salt`."""
        return _hex(self._keys.get(tenant, self._open_key), client_salt)


def new_cache_salts(config: Config) -> CacheSalts:
    """Create the CacheSalts of a configuration.

    The secret is `cache.secret`, else the key that the gateways share. Without both, each tenant's
    or group's secret is derived from its API keys. In each case it is equal on all gateways and
    after a restart.
    """
    secret = shared_secret(config)
    open_key = hmac.digest(secret or _LABEL, b"no tenant", "sha256")
    if config.cache.isolate == "off":
        return CacheSalts({}, open_key)
    keys: dict[str, bytes] = {}
    for domain, tenants in group_by_domain(config.tenants).items():
        key = hmac.digest(secret or derived_secret(tenants), domain, "sha256")
        keys.update(dict.fromkeys((tenant.name for tenant in tenants), key))
    return CacheSalts(keys, open_key)


def group_by_domain(tenants: Sequence[Tenant]) -> dict[bytes, list[Tenant]]:
    """Group the tenants that share cached prompts.

    The key is `group NAME` for tenants with a cache group, else `tenant NAME`, as bytes.
    """
    groups: dict[bytes, list[Tenant]] = {}
    for tenant in tenants:
        group = tenant.cache_group
        domain = f"tenant {tenant.name}" if group is None else f"group {group}"
        groups.setdefault(domain.encode(), []).append(tenant)
    return groups


def shared_secret(config: Config) -> bytes | None:
    """Return the secret that all gateways with this configuration share; None if there is none."""
    if config.cache.secret is not None:
        return config.cache.secret.reveal().encode()
    return None if config.shared is None else _of_gateways(config.shared.key)


def other_shared_secret(config: Config) -> bytes | None:
    """Return the secret of gateways that have `shared.other_key` as their key.

    Returns None if there is none, or if it equals the secret of this configuration.
    """
    if config.cache.secret is not None or config.shared is None or config.shared.other_key is None:
        return None
    return _of_gateways(config.shared.other_key)


def _of_gateways(key: Secret) -> bytes:
    return hmac.digest(key.reveal().encode(), _LABEL, "sha256")


def derived_secret(tenants: Sequence[Tenant]) -> bytes:
    """Derive a secret from the API keys of these tenants only.

    A change of another tenant's key then does not change the secret.
    """
    digests = sorted(hashlib.sha256(tenant.key.reveal().encode()).digest() for tenant in tenants)
    return hmac.digest(_LABEL, b"".join(digests), "sha256")


def _hex(key: bytes, client_salt: bytes) -> bytes:
    return hmac.digest(key, client_salt, "sha256").hex().encode()

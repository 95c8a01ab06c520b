"""Secrets that gateways derive from the same configuration, for cache salts and response ids."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from gateway.config import Config, Tenant
from gateway.config.value_types import Secret

SALT_LABEL = b"penstock cache salt 1"


def shared_secret(config: Config) -> bytes | None:
    """Return the secret that gateways with this configuration derive salts and ids from.

    Returns None if the configuration has no secret that all gateways share.
    """
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
    return hmac.digest(key.reveal().encode(), SALT_LABEL, "sha256")


def derived_secret(tenants: Sequence[Tenant]) -> bytes:
    """Derive a secret from the API keys of these tenants only.

    A change of another tenant's key then does not change the secret.
    """
    digests = sorted(hashlib.sha256(tenant.key.reveal().encode()).digest() for tenant in tenants)
    return hmac.digest(SALT_LABEL, b"".join(digests), "sha256")

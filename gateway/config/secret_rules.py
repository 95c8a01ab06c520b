"""Checks keys and passwords in a configuration, and the use of ${file:...} references.

Every setting for a key or a password is listed here. `${file:...}` may be used only for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gateway.config.problems import Path
from gateway.config.rule_findings import (
    RuleFinding,
    get_member,
    iter_endpoints,
    iter_mappings,
    iter_tls_sections,
)
from gateway.config.s3_section import S3_SECRETS
from gateway.config.yaml_source import Substituted


def errors(data: Any) -> Iterator[RuleFinding]:
    """Yield an error for each ${file:...} reference in a setting that is not a secret.

    Other settings, such as names and labels, are shown on many pages. Without this rule, anyone who
    may submit a configuration could make such a setting show the content of any file.
    """
    text = "is not a secret, and ${file:...} is allowed only for secrets; write ${NAME}"
    secrets = {path for path, _ in _secrets(data)}
    for path, value in _iter_leaves(data, ()):
        if isinstance(value, Substituted) and "${file:" in value.written and path not in secrets:
            yield RuleFinding(path, text)


def warnings(data: Any) -> Iterator[RuleFinding]:
    """Yield a warning for each secret that is written in the configuration file itself."""
    text = "is written into the file; ${NAME} or ${file:/path} keeps it out of backups and diffs"
    for path, value in _secrets(data):
        if isinstance(value, str) and not isinstance(value, Substituted):
            yield RuleFinding(path, text)


def secrets_in_clear(data: Any) -> Iterator[Path]:
    """Yield the paths of secrets that are written in the configuration text itself.

    The default value of a reference, as in ${NAME:-secret}, is part of the text too.
    """
    for path, value in _secrets(data):
        if value is not None and not (isinstance(value, Substituted) and value.is_all_by_reference):
            yield path


def _secrets(data: Any) -> Iterator[tuple[Path, Any]]:
    yield from (((*path, key), get_member(owner, key)) for path, owner, key in _secret_owners(data))
    yield from further_keys(data)


def further_keys(data: Any) -> Iterator[tuple[Path, Any]]:
    """Yield the path and value of every API key of a tenant except its first one."""
    for path, tenant in iter_mappings(get_member(data, "tenants"), ("tenants",)):
        keys = get_member(tenant, "keys")
        yield from (
            ((*path, "keys", index), key)
            for index, key in enumerate(keys if isinstance(keys, list) else ())
        )
        scoped = iter_mappings(get_member(tenant, "scoped_keys"), (*path, "scoped_keys"))
        yield from (((*inner, "key"), get_member(item, "key")) for inner, item in scoped)


def _secret_owners(data: Any) -> Iterator[tuple[Path, Any, str]]:
    yield (("admin",), get_member(data, "admin"), "key")
    yield (("cache",), get_member(data, "cache"), "secret")
    yield (
        ("observability", "traces"),
        get_member(get_member(data, "observability"), "traces"),
        "key",
    )
    shared = get_member(data, "shared")
    yield (("shared",), shared, "key")
    yield (("shared",), shared, "other_key")
    yield (("shared", "redis"), get_member(shared, "redis"), "password")
    s3 = get_member(get_member(data, "batch"), "s3")
    yield from ((("batch", "s3"), s3, key) for key in S3_SECRETS)
    yield from (
        (path, tenant, "key")
        for path, tenant in iter_mappings(get_member(data, "tenants"), ("tenants",))
    )
    yield from ((path, spec, "api_key") for path, spec in iter_endpoints(data))
    for path, section in iter_tls_sections(data):
        yield (path, section, "key_password")
        yield from (
            (inner, pair, "key_password")
            for inner, pair in iter_mappings(get_member(section, "more"), (*path, "more"))
        )
    for path, pool in iter_mappings(get_member(data, "pools"), ("pools",)):
        yield (
            (*path, "discover", "endpoint"),
            get_member(get_member(pool, "discover"), "endpoint"),
            "api_key",
        )


def _iter_leaves(data: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    pairs: Any = None
    if isinstance(data, dict):
        pairs = data.items()
    elif isinstance(data, list):
        pairs = enumerate(data)
    if pairs is None:
        yield path, data
        return
    for key, value in pairs:
        yield from _iter_leaves(value, (*path, key))

"""The configuration section `admin`: the key for changes, and the names of the admin server."""

from __future__ import annotations

from pydantic import field_validator

from gateway.config.value_types import Host, Secret, Section, check_sendable, setting


class Admin(Section):
    """Settings of the admin server that decide who may make changes. Reading needs no key."""

    key: Secret | None = setting(
        None,
        "Key that requests for changes must send, by reference: ${NAME} or ${file:/path}. Without "
        "it, changes are accepted only from this machine.",
    )
    hosts: tuple[Host, ...] = setting(
        (),
        "Further host names that the admin server accepts in the Host header; addresses and "
        "localhost are always accepted.",
    )

    _sendable_key = field_validator("key")(check_sendable)

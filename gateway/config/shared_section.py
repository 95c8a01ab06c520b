"""The configuration section `shared`: state that several gateways share through a Redis server."""

from __future__ import annotations

from typing import Annotated

from pydantic import (
    Field,
    StringConstraints,
    ValidationInfo,
    field_validator,
    model_validator,
)

from gateway.config.tls_sections import ClientTls
from gateway.config.value_types import Interval, Name, RedisUrl, Secret, Section, Size, setting


class Redis(Section):
    """The Redis server through which several gateways exchange state.

    Messages are authenticated but not encrypted; a rediss:// URL encrypts the connection.
    """

    url: RedisUrl = Field(
        description="URL of the Redis server: redis://host:port, or rediss:// for TLS. The "
        "path, if any, is the number of the database."
    )
    username: Name | None = setting(None, "User name for Redis, if the server has several users.")
    password: Secret | None = setting(
        None, "Password for Redis, by reference: ${NAME} or ${file:/path}."
    )
    tls: ClientTls | None = setting(
        None,
        "Certificate files for a rediss:// URL; by default the system's certificate "
        "authorities are trusted.",
    )

    @model_validator(mode="after")
    def _needs_tls_url(self) -> Redis:
        if self.tls is not None and not self.url.startswith("rediss://"):
            raise ValueError("tls requires a url that begins with rediss://")
        return self


class Shared(Section):
    """Settings for sharing state between several gateways.

    A gateway that cannot reach the others continues with the state that it has.
    """

    redis: Redis = Field(description="The Redis server through which the gateways exchange state.")
    key: Secret = Field(
        description="A secret key, written as a reference, with which messages between gateways "
        "are authenticated. All gateways have the same; at least 16 characters."
    )
    other_key: Secret | None = setting(
        None,
        "A second key, written as a reference, for changing `key` without a pause: the next key "
        "before the change, the previous one after it. Messages under it are accepted, but none "
        "are sent.",
    )
    fleet: Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z._-]{1,64}$")] = setting(
        "penstock",
        "Name of the group of gateways that share state. Their keys in Redis begin with this "
        "name, so that several groups can use one Redis server.",
    )
    flush: Interval = setting(
        "75ms",
        "Time for which updates for the other gateways are collected before they are sent "
        "together.",
    )
    memory: Size = setting(
        "16MiB",
        "Memory for recent messages, from which a gateway that starts learns the current state.",
    )

    @field_validator("key", "other_key")
    @classmethod
    def _long_enough(cls, key: Secret | None) -> Secret | None:
        if key is not None and len(key.reveal()) < 16:
            raise ValueError(
                "the secret is too short; it must have at least 16 characters, so that it cannot "
                "be guessed"
            )
        return key

    @field_validator("other_key")
    @classmethod
    def _is_another(cls, other: Secret | None, info: ValidationInfo) -> Secret | None:
        key = info.data.get("key")
        if other is not None and key is not None and other.reveal() == key.reveal():
            raise ValueError("the secret must not be equal to `key`; use another secret")
        return other

"""The sections of the view that several gateways share, and of the Redis through which they share it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints, field_validator, model_validator

from gateway.config.tls import ClientTls
from gateway.config.values import Interval, Name, RedisUrl, Secret, Section, Size, setting


class Redis(Section):
    """The Redis through which gateways hear each other. What is said is sealed, not encrypted: rediss:// encrypts."""

    url: RedisUrl = Field(
        description="redis://host:port, or rediss:// for TLS; a path is the number of the database."
    )
    username: Name | None = setting(None, "Its user, where Redis has several.")
    password: Secret | None = setting(None, "Its password, by reference: ${NAME} or ${file:/path}.")
    tls: ClientTls | None = setting(
        None, "Files for rediss://. Without it the system's authorities are trusted."
    )

    @model_validator(mode="after")
    def _encrypted(self) -> Redis:
        if self.tls is not None and not self.url.startswith("rediss://"):
            raise ValueError("tls needs a url that begins with rediss://")
        return self


class Shared(Section):
    """One view among several gateways of a fleet. A gateway that hears nobody goes on with what it knows itself."""

    redis: Redis = Field(description="Where the gateways meet.")
    key: Secret = Field(
        description="What they have in common, by reference; 16 characters or more, the same for all."
    )
    fleet: Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z._-]{1,64}$")] = setting(
        "penstock", "Name of the fleet, so that several may use one Redis: its keys begin with it."
    )
    flush: Interval = setting("75ms", "How long news is gathered before it is told.")
    memory: Size = setting("16MiB", "Memory for what a gateway that starts is told by the others.")

    @field_validator("key")
    @classmethod
    def _long_enough(cls, key: Secret) -> Secret:
        if len(key.reveal()) < 16:
            raise ValueError("is shorter than 16 characters, which is too easily guessed")
        return key

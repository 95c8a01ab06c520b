"""What the choice of policies needs of the process that it runs in: a gateway, or a supervisor."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from gateway.config import LoadedConfig

EndpointRows = Callable[[], Awaitable[Sequence[Mapping[str, Any]]]]
"""Returns the endpoints as on the admin server's page /endpoints."""


class ChangeResult(msgspec.Struct, frozen=True):
    """The result of a configuration change, as of a ReloadOutcome.

    changed  paths of the settings that it changes
    """

    result: str
    message: str
    version: int
    changed: tuple[str, ...] = ()


class AutoTarget(Protocol):
    """One gateway process, or all workers of one; the configuration of both can be changed."""

    @property
    def running(self) -> LoadedConfig:
        """The configuration in force."""
        ...

    @property
    def version(self) -> int: ...

    def is_draining(self) -> bool: ...

    def endpoint_rows(self) -> Awaitable[Sequence[Mapping[str, Any]]]:
        """Return the endpoints as on the admin server's page /endpoints."""
        ...

    async def change(self, text: bytes, reason: str, *, dry_run: bool) -> ChangeResult:
        """Apply a text in place of the configuration in force, or only try it."""
        ...

"""The interface through which automatic policy selection changes the configuration."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from gateway.config import LoadedConfig

EndpointRows = Callable[[], Awaitable[Sequence[Mapping[str, Any]]]]
"""A function that returns the rows about endpoints that the admin page /endpoints shows."""


class ChangeResult(msgspec.Struct, frozen=True):
    """The result of a configuration change by automatic policy selection.

    result   "applied" on success; else for example "rejected", or "dry_run"
    message  what happened, for the operator
    version  number of the current configuration version
    changed  paths of the changed settings
    """

    result: str
    message: str
    version: int
    changed: tuple[str, ...] = ()


class ConfigAccess(Protocol):
    """The interface through which automatic policy selection reads and changes the configuration.

    One implementation changes a single gateway process. The other changes all worker processes of a
    supervisor.
    """

    @property
    def running(self) -> LoadedConfig:
        """Return the configuration that this gateway uses now."""
        ...

    @property
    def version(self) -> int: ...

    def is_draining(self) -> bool: ...

    def endpoint_rows(self) -> Awaitable[Sequence[Mapping[str, Any]]]:
        """Return the state of all endpoints, as the admin page /endpoints shows it."""
        ...

    async def change(self, text: bytes, reason: str, *, dry_run: bool) -> ChangeResult:
        """Replace the current configuration by this text, and return the result.

        reason   why the change is made, for the version history
        dry_run  whether to only validate the text, without applying it
        """
        ...

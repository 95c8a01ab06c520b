"""Lets automatic policy selection change the configuration of a gateway process without workers."""

from __future__ import annotations

from collections.abc import Callable

from gateway.auto.config_access_interface import ChangeResult, EndpointRows
from gateway.config import LoadedConfig
from gateway.reload.reloader import ChangeOptions, Reloader

TRIGGER = "auto"


class GatewayConfigAccess:
    """Lets automatic policy selection read and change the configuration of one gateway process.

    `rows` is a function that returns the endpoints as the admin page /endpoints shows them.
    """

    def __init__(
        self, reloader: Reloader, rows: EndpointRows, is_draining: Callable[[], bool]
    ) -> None:
        self._reloader, self.endpoint_rows, self.is_draining = reloader, rows, is_draining

    @property
    def running(self) -> LoadedConfig:
        return self._reloader.running

    @property
    def version(self) -> int:
        return self._reloader.version.number

    async def change(self, text: bytes, reason: str, *, dry_run: bool) -> ChangeResult:
        """Apply a configuration text, unless the configuration has changed since the text was made.

        References in the text are resolved as in the current configuration. Discovered endpoints
        stay as they are.

        reason   why the change is made, for the version history
        dry_run  whether to only validate the text, without applying it
        """
        outcome = await self._reloader.put(
            text,
            TRIGGER,
            if_match=self._reloader.version.etag,
            options=ChangeOptions(dry_run=dry_run, force=True, was_in_force=True, reason=reason),
        )
        return ChangeResult(
            outcome.result,
            outcome.message,
            outcome.version.number,
            tuple(change.path for change in outcome.changes),
        )

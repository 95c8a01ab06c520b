"""One gateway process without workers, as the target of the choice of policies."""

from __future__ import annotations

from collections.abc import Callable

from gateway.auto.target import ChangeResult, EndpointRows
from gateway.config import LoadedConfig
from gateway.reload.reloader import ChangeOptions, Reloader

TRIGGER = "auto"


class GatewayAutoTarget:
    """An AutoTarget that is one gateway process; `rows` returns the page /endpoints."""

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
        """Apply the text unless another change has come first.

        The references in it were in force before, and its endpoints are those of now.
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

"""Lets automatic policy selection (`policy: auto`) change the configuration of all workers."""

from __future__ import annotations

import json
from collections.abc import Callable
from time import time

from gateway.auto.config_access_interface import ChangeResult, EndpointRows
from gateway.config import LoadedConfig
from gateway.reload.history import create_version
from gateway.reload.reloader import ChangeOptions
from gateway.workers.config_rollout import ConfigRollout, response_message, response_result


class WorkersConfigAccess:
    """Lets automatic policy selection read and change the configuration of all workers together.

    `rows` is a function that returns their endpoints as the admin page /endpoints shows them.
    """

    def __init__(
        self, rollout: ConfigRollout, rows: EndpointRows, is_draining: Callable[[], bool]
    ) -> None:
        self._rollout, self.endpoint_rows, self.is_draining = rollout, rows, is_draining

    @property
    def running(self) -> LoadedConfig:
        return self._rollout.running

    @property
    def version(self) -> int:
        return self._rollout.version

    async def change(self, text: bytes, reason: str, *, dry_run: bool) -> ChangeResult:
        """Apply the configuration text to all workers, unless another change came first.

        reason   why the change is made, for the version history
        dry_run  whether to only validate the text, without applying it
        """
        running = create_version(self.version, time(), "", self.running, ())
        response = await self._rollout.put(
            text,
            {"If-Match": running.etag},
            ChangeOptions(
                dry_run=dry_run, force=True, was_in_force=True, trigger="auto", reason=reason
            ),
        )
        changes = json.loads(response.body).get("changes", ())
        return ChangeResult(
            response_result(response),
            response_message(response),
            self.version,
            tuple(change["path"] for change in changes),
        )

"""Pauses after failed pulls: the endpoints that are not asked for prompts' beginnings for a while.

A request pays for a failed pull with a wait. An engine that cannot hand over beginnings at all, or
that is late each time, would delay each request whose prompt it has cached.
"""

from __future__ import annotations

import logging
from collections.abc import Container

log = logging.getLogger("penstock")

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 300.0


class PullPauses:
    """How long each endpoint is not asked for beginnings: twice as long after each failed pull.

    A pull that is served ends the pauses of its source.
    """

    __slots__ = ("_pauses",)

    def __init__(self) -> None:
        # by the name of the source: when its newest pause ends, and its length in seconds
        self._pauses: dict[str, tuple[float, float]] = {}

    def on_failed(self, source: str, now: float, *, is_final: bool = False) -> None:
        """Begin a pause of a source whose pull has failed.

        is_final  whether the engine has shown that it cannot serve pulls; then the pause is the
                  longest one

        Failures during a pause change nothing: those pulls began before it.
        """
        until, length_s = self._pauses.get(source, (0.0, 0.0))
        if now < until and not is_final:
            return
        length_s = LONGEST_PAUSE_S if is_final else min(2.0 * length_s, LONGEST_PAUSE_S)
        length_s = max(length_s, FIRST_PAUSE_S)
        self._pauses[source] = now + length_s, length_s
        log.info("no KV is pulled from endpoint %s for %g s: a pull has failed", source, length_s)

    def forget(self, source: str) -> None:
        """Forget the failures of a source, which has served a pull or is configured no longer."""
        self._pauses.pop(source, None)

    def paused(self, now: float) -> Container[str]:
        """Return the names of the endpoints that are not to be sources now."""
        return {source for source, (until, _) in self._pauses.items() if now < until}

"""Decides when a poll requests an endpoint's health page and its metrics page. No I/O.

A thousand endpoints may be polled every second, so a poll requests only what is not known already.
An engine that is sending answers is alive, and the load of an idle engine rarely changes.
"""

from __future__ import annotations

from math import inf

from gateway.config import Config
from gateway.fleet.live_endpoint import LiveEndpoint
from policies.engine_kinds import ENGINE_TRAITS
from policies.health.endpoint_health import HealthState

QUIET_PROBES_PER_S = 256
"""Maximum number of probes per second, in total, to endpoints that are up and have no requests.

In a large fleet, each such endpoint is therefore probed less often. If it has failed, the first
request finds that out as well, and is sent elsewhere.
"""

UNPROBED_POLLS = 4
"""Maximum number of consecutive polls without a health probe.

A poll needs none if the engine has answered requests since the last poll."""

IDLE_SCRAPE = 3.0
"""Number of poll intervals between two scrapes of an endpoint without requests."""

FRESH_SHARE = 0.6
"""Latest time of the next scrape of an idle endpoint, as a share (0 to 1) of `scrape.stale`.

Its load is thus read again before it counts as outdated, even where IDLE_SCRAPE would allow more
time.
"""

TOLERANCE = 0.8
"""Share of an interval (0 to 1) after which a page may be requested again.

The pauses between polls are random. Without this tolerance, a poll that comes slightly too early
would leave the page to the next poll.
"""


def least_probe_s(live: LiveEndpoint) -> float:
    """Return the shortest time between two health checks of an endpoint, in seconds.

    It is longer for hosted providers, which limit the number of requests: health checks must leave
    nearly all of that number to client requests.
    """
    return ENGINE_TRAITS[live.endpoint.engine].least_probe_s


class PollPlan:
    """Decides for one endpoint which of its pages the next poll requests.

    needs_probe   whether the poll requests the health page
    needs_scrape  whether the poll requests the metrics page, which shows the load
    """

    __slots__ = (
        *("_polled_at", "_probed_at", "_scraped_at", "_unprobed"),
        *("needs_probe", "needs_scrape"),
    )

    def __init__(self) -> None:
        self._polled_at, self._probed_at, self._scraped_at = 0.0, -inf, -inf
        self._unprobed = 0
        self.needs_probe = self.needs_scrape = True

    def begin(self, live: LiveEndpoint, config: Config, endpoints: int, now: float) -> None:
        """Decide which pages this poll requests, and record that they have been requested.

        endpoints  number of endpoints of the gateway; idle ones are polled less often if it is
                   large
        now        monotonic time in seconds
        """
        interval_s = max(config.health.interval, least_probe_s(live))
        if not live.load.in_flight and live.health.state is HealthState.UP and live.load.is_proven:
            interval_s = max(interval_s, endpoints / QUIET_PROBES_PER_S)
        self.needs_probe = self._is_due(self._probed_at, interval_s, now) and not self._shows_life(
            live
        )
        self.needs_scrape = self._is_due(
            self._scraped_at, self._scrape_interval_s(live, config), now
        )
        self._unprobed = 0 if self.needs_probe else self._unprobed + 1
        if self.needs_probe:
            self._probed_at = now
        if self.needs_scrape:
            self._scraped_at = now
        self._polled_at = now

    @staticmethod
    def _is_due(last: float, interval_s: float, now: float) -> bool:
        return now - last >= TOLERANCE * interval_s

    def _shows_life(self, live: LiveEndpoint) -> bool:
        # Return whether a healthy endpoint has sent part of an answer since the last poll.
        return (
            live.health.state is HealthState.UP
            and live.load.is_proven
            and live.upstream.last_body_at > self._polled_at
            and self._unprobed < UNPROBED_POLLS
        )

    @staticmethod
    def _scrape_interval_s(live: LiveEndpoint, config: Config) -> float:
        # Return the maximum age of the last scrape in seconds; it is shorter under load.
        interval_s = config.scrape.interval
        load = live.load
        if load.in_flight or load.unexplained_requests or load.scraped_at is None:
            return interval_s
        return max(interval_s, min(IDLE_SCRAPE * interval_s, FRESH_SHARE * config.scrape.stale))

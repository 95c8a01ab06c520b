"""Decides whether the KV events of an endpoint's ranks can be trusted. No I/O.

The events describe the endpoint's cache exactly under two conditions. The events of all ranks are
complete and up to date, and the cached tokens that its answers report agree with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.fleet.kv_events.rank_event_stream import EventSource

SILENT_S = 3.0
"""Seconds to wait for the KV events that report the blocks of a complete answer.

Without any event by then, the endpoint's events are not trusted until one arrives."""

AUDITS_KEPT, LEAST_AUDITS = 32, 8
MAX_ERROR_SHARE = 0.25
FIRST_DISTRUST_S, MAX_DISTRUST_S = 30.0, 3600.0


class CacheExpectation(msgspec.Struct, frozen=True):
    """How many cached tokens an answer has to report, if the engine's KV events are right.

    reserved_at  monotonic time at which the request reserved capacity at the endpoint
    least        smallest possible number, in the engine's count of tokens; None if unknown
    most         largest possible number, in the engine's count of tokens; None if unknown
    """

    reserved_at: float
    least: float | None = None
    most: float | None = None


class EndpointEvents:
    """The KV event sources of one endpoint, one per data-parallel rank, in the order of the ranks.

    problem  why the endpoint has no sources; "" if it has some
    audits   number of answers whose cached tokens were compared with the KV events
    errors   number of these answers that disagreed with the KV events
    """

    __slots__ = (
        *("_backoff_s", "_error_share", "_expected_since", "_recent_audits", "_trusted_from"),
        *("audits", "errors", "is_silent", "problem", "sources"),
    )

    def __init__(self, sources: Sequence[EventSource] = (), problem: str = "") -> None:
        self.sources, self.problem = tuple(sources), problem
        self._expected_since: float | None = None
        self.is_silent = False
        self._error_share, self._recent_audits = 0.0, 0
        self._trusted_from, self._backoff_s = 0.0, FIRST_DISTRUST_S
        self.audits = self.errors = 0

    @property
    def block_tokens(self) -> int:
        """Return the number of tokens per KV block; 0 while unknown, or if the ranks differ."""
        sizes = {source.block_tokens for source in self.sources if source.block_tokens}
        return sizes.pop() if len(sizes) == 1 else 0

    @property
    def heard_at(self) -> float:
        """Return the monotonic time at which the newest KV event message of any rank arrived."""
        return max((source.heard_at for source in self.sources), default=float("-inf"))

    def is_exact(self, now: float) -> bool:
        """Return whether the KV events describe the endpoint's cache exactly at time `now`.

        Then the prefix index need not predict the endpoint's cached tokens.
        """
        return bool(self.sources) and not self.obstacle(now)

    def obstacle(self, now: float) -> str:
        """Return why the KV events cannot be relied on for the endpoint's cache; "" if they can."""
        if not self.sources:
            return self.problem
        for rank, source in enumerate(self.sources):
            if not source.is_current:
                return source.state if len(self.sources) == 1 else f"rank {rank}: {source.state}"
        if self.is_silent:
            return "answers without events"
        return "" if now >= self._trusted_from else "answers disagree"

    def on_answer(
        self, expected: CacheExpectation, prompt_tokens: int, cached_tokens: int, now: float
    ) -> None:
        """Compare the cached tokens that a complete answer reports with the KV events.

        If too many answers disagree, the events are not trusted for some time.

        expected       what the events predicted when the request was sent
        prompt_tokens  number of tokens of the prompt, as the engine reports it
        cached_tokens  number of them that were cached, as the engine reports it
        now            monotonic time in seconds
        """
        size = self.block_tokens
        computes = prompt_tokens - cached_tokens >= 2 * (size or 128)
        if computes and self.heard_at < expected.reserved_at and self._expected_since is None:
            self._expected_since = now
        if expected.least is None or not size:
            return
        tolerance = 2 * size + 0.02 * prompt_tokens
        is_right = cached_tokens >= expected.least - tolerance and (
            expected.most is None or cached_tokens <= expected.most + tolerance
        )
        self._audit(is_right=is_right, now=now)

    def _audit(self, *, is_right: bool, now: float) -> None:
        self.audits += 1
        self.errors += not is_right
        if now < self._trusted_from:
            return
        self._recent_audits += 1
        weight = 1 / min(self._recent_audits, AUDITS_KEPT)
        self._error_share += weight * ((not is_right) - self._error_share)
        if self._recent_audits >= AUDITS_KEPT and self._error_share < MAX_ERROR_SHARE / 4:
            self._backoff_s = FIRST_DISTRUST_S
        if self._recent_audits >= LEAST_AUDITS and self._error_share > MAX_ERROR_SHARE:
            self._return_to_estimates(now)

    def _return_to_estimates(self, now: float) -> None:
        self._trusted_from = now + self._backoff_s
        self._backoff_s = min(MAX_DISTRUST_S, 2 * self._backoff_s)
        self._error_share, self._recent_audits = 0.0, 0
        for source in self.sources:
            source.resynchronize(now)

    def tick(self, now: float) -> None:
        """Check two timeouts: for replays, and for the KV events that must follow an answer."""
        for source in self.sources:
            source.tick(now)
        since = self._expected_since
        if since is not None and self.heard_at > since - SILENT_S:
            self._expected_since = since = None
        if since is not None and now - since > SILENT_S:
            self.is_silent = True
        elif self.is_silent and since is None:
            self.is_silent = False

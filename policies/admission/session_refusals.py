"""Refuses requests of new sessions whose contexts do not fit the fleet's KV memory.

adaptive_session_limit.py computes the limit. The policies in cap_admission.py and
priced_admission.py apply it.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.admission.adaptive_session_limit import (
    SessionGate,
    WorkingSet,
    fleet_kv_tokens,
    is_continuation,
)
from policies.admission.admission_policy import (
    RequestOutcome,
    Shed,
)
from policies.prefix.prefix_match import longest_match
from policies.routing_types import Candidate, Pick, Request, RoutingQuery

ON_EVIDENCE = SessionGate(start=None, memory_s=60.0, shortest_s=20.0)
"""Parameters of a limit on sessions that is applied only once evicted contexts do harm.

Harm means that returning sessions find their cached contexts evicted while prompts wait. While this
limit is applied, an idle session counts for a shorter time than under a limit that always applies.
"""


class SessionLimit:
    """Counts the active sessions, and refuses new ones whose contexts do not fit the KV memory.

    sessions  the active sessions
    """

    __slots__ = ("sessions",)

    def __init__(self, gate: SessionGate) -> None:
        self.sessions = WorkingSet(gate)

    def refusal(
        self, query: RoutingQuery, candidates: Sequence[Candidate], cached_tokens: int
    ) -> Shed | None:
        """Return the refusal of a request whose new session does not fit; None if it may enter.

        `cached_tokens` is the largest number of prompt tokens that any candidate has cached.
        """
        request, sessions = query.request, self.sessions
        if not request.session or not sessions.is_limited:
            return None
        # A session that was recognised at its second turn has its context in the KV already.
        if request.is_session_inferred and is_continuation(request.prompt_tokens, cached_tokens):
            return None
        kv_tokens = fleet_kv_tokens(candidates)
        tokens = request.prompt_tokens + request.output_tokens
        if kv_tokens is None or sessions.can_admit(request.session, tokens, kv_tokens):
            return None
        if sessions.can_enter_beyond(candidates, query.now):
            return None
        text = (
            f"The {len(sessions)} active sessions use {sessions.tokens} tokens of context, "
            f"and new ones enter below {sessions.memory_share * kv_tokens:.0f}, "
            f"{sessions.memory_share:.0%} of the fleet's KV cache."
        )
        wait_s = sessions.seconds_until_room(request.prompt_tokens, kv_tokens, query.now)
        if wait_s is not None:
            wait_s *= 0.75 + 0.5 * query.rng.random()
        return Shed("session_memory", wait_s, text)

    def on_reserved(self, query: RoutingQuery, pick: Pick) -> None:
        """Record that a request of a session was sent to an endpoint."""
        request = query.request
        if request.session:
            self.sessions.on_reserved(
                request.session,
                request.prompt_tokens,
                longest_match(query.cached_by_slot),
                pick.cached_tokens,
                query.now,
            )

    def on_ended(self, request: Request, outcome: RequestOutcome) -> None:
        """Record how a request of a session ended. `on_reserved` must have been called for it."""
        if not request.session:
            return
        has_answer = outcome.ttft_s is not None
        context = request.prompt_tokens + outcome.output_tokens if has_answer else None
        self.sessions.on_ended(request.session, context, outcome.cached_tokens, outcome.now)
        if request.session_hints is not None and outcome.status != "dropped":
            self.sessions.apply_hints(request.session, request.session_hints, outcome.now)

"""When a simulated client whose request was refused sends it again, or that it gives up."""

from __future__ import annotations

from random import Random

from planner.replay.replay_options import ClientBehaviour
from policies.admission.admission_policy import Shed

SHORT_BACKOFF_S, LONG_BACKOFF_S = 0.5, 8.0
LARGEST_JITTER = 0.25
"""Maximum share of a back-off by which it is shortened at random."""


def return_delay(
    clients: ClientBehaviour, refusals: int, refusal: Shed, rng: Random
) -> float | None:
    """Return the seconds after which a client retries; None: it gives up.

    refusals  how often its request was refused, including this time
    refusal   the newest refusal
    rng       source of the random part of a back-off
    """
    obeys = clients.obeys_retry_after
    if refusals > clients.retries or (obeys and not refusal.may_return):
        return None
    if obeys and refusal.retry_after_s is not None:
        return refusal.retry_after_s
    backoff_s = min(LONG_BACKOFF_S, SHORT_BACKOFF_S * 2.0 ** (refusals - 1))
    return backoff_s * (1 - LARGEST_JITTER * rng.random())

"""The refusals of requests: their reasons, their texts, and when the client should retry."""

from __future__ import annotations

from math import inf

from policies.admission.admission_policy import Shed, WaitQueueView


def shed_until(reason: str, retry_after_s: float | None, detail: str) -> Shed:
    """Build the refusal of a request, with the time after which its client should retry.

    reason         short label for logs and metrics
    retry_after_s  seconds until the client may retry; None: not measured yet; inf: never
    detail         the numbers that led to the refusal
    """
    if retry_after_s == inf:
        return Shed(reason, None, detail, may_return=False)
    return Shed(reason, retry_after_s, detail)


def occupancy_text(queue: WaitQueueView, expected_s: float | None) -> str:
    """Return the part of a refusal message that describes how full the wait queue is.

    `expected_s` is the expected seconds until a permit is free; None: unknown.
    """
    running = f"The pool has {queue.busy_permits} of at most {queue.capacity} requests running"
    text = f"{running} and {queue.waiting} waiting"
    if expected_s == inf:
        return f"{text}; no capacity is expected in the next minutes"
    return text if expected_s is None else f"{text}; capacity is expected in {expected_s:.1f} s"


def shed_no_capacity() -> Shed:
    """Return the refusal of a request to a pool without an available endpoint.

    It has no Retry-After.
    """
    return Shed("no_capacity", None, "No endpoint is available.")


def shed_early(early_s: float) -> Shed:
    """Return the refusal of a request that came `early_s` seconds before its Retry-After time."""
    text = f"This request came before its Retry-After time, which is in {early_s:.1f} s."
    return Shed("early", early_s, text)


def shed_queue_full(queue: WaitQueueView, retry_after_s: float | None) -> Shed:
    """Return the refusal of a request that arrived while the wait queue was full.

    retry_after_s  seconds until the client may retry; None: not measured yet; inf: never
    """
    text = f"The wait queue is full. {occupancy_text(queue, retry_after_s)}."
    return shed_until("waiting_room_full", retry_after_s, text)


def shed_timed_out(queue: WaitQueueView, retry_after_s: float | None) -> Shed:
    """Return the refusal of a request that has waited in the queue for the maximum time.

    retry_after_s  seconds until the client may retry; None: not measured yet; inf: never
    """
    text = f"No endpoint became free in time. {occupancy_text(queue, retry_after_s)}."
    return shed_until("waited_too_long", retry_after_s, text)


def shed_past_deadline(queue: WaitQueueView, needed_s: float, left_s: float) -> Shed:
    """Return the final refusal of a request whose client would give up before the first token.

    needed_s  seconds until the first token is expected
    left_s    seconds until the client gives up
    """
    patience = f"The client gives up in {max(0.0, left_s):.1f} s"
    text = f"{patience} and the first token is expected in {needed_s:.1f} s"
    return Shed("deadline", None, f"{text}. {occupancy_text(queue, None)}.", may_return=False)

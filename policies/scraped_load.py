"""Compares an engine's own metrics with the reserved load: requests from outside, and free slots.

This module changes the scraped numbers of EndpointLoad. load_ledger.py changes the reserved ones.
"""

from __future__ import annotations

from policies.endpoint_load import EndpointLoad

FREE_KV = 0.9
"""Share of KV in use (0 to 1) below which waiting prompts are assumed not to wait for KV.

They then wait for something else, such as a free sequence of the engine's batch.
"""

LONG_WAIT = 10
"""Number of decode steps after which a prompt no longer waits for the end of the engine's step."""

PART_OF_STEP = 0.25
"""Share of a step's believed size (0 to 1) up to which prompts certainly fit into one step.

It is small, because the believed size, in tokens, may be several times too large.
"""


def record_scrape(
    load: EndpointLoad,
    running: int | None,
    waiting: int | None,
    kv_usage: float | None,
    kv_tokens: int | None,
    now: float,
) -> None:
    """Store an engine's own metrics, and derive how many external requests it has.

    External requests do not come through the gateways.

    running    requests that the engine runs; None: not reported
    waiting    requests that wait in the engine; None: not reported
    kv_usage   fraction of KV in use, 0 to 1; None: not reported
    kv_tokens  KV capacity in tokens; None: not reported

    Only requests in excess of the reserved ones at two scrapes in a row count as external. An
    excess at one scrape may be a request that another gateway has not announced yet, or one that
    ended while the metrics were read.
    """
    if waiting and running and kv_usage is not None and load.is_modelled:
        _learn_slots(load, running, kv_usage, now)
    beyond = max(0, (running or 0) + (waiting or 0) - load.in_flight)
    if load.in_flight or beyond or load.unexplained_requests or kv_usage != load.kv_usage:
        load.mark_changed()
    load.external_requests = min(beyond, load.unexplained_requests)
    load.unexplained_requests, load.scraped_at = beyond, now
    load.running, load.waiting, load.kv_usage = running, waiting, kv_usage
    if kv_tokens is not None:
        load.kv_tokens = kv_tokens
    if load.is_modelled:
        load.timeline.on_scrape(load, kv_usage, now)


def _learn_slots(load: EndpointLoad, running: int, kv_usage: float, now: float) -> None:
    # Learn how many sequences the engine runs at a time, from a prompt that waits although KV is
    # free. As many sequences must have run at the previous scrape, when prompts waited as well.
    if running > load.slots or (
        load.waiting
        and load.running == running
        and kv_usage < FREE_KV
        and _is_slot_missing(load, running, now)
    ):
        load.slots = float(running)


def _is_slot_missing(load: EndpointLoad, running: int, now: float) -> bool:
    # Return whether the oldest waiting prompt lacks a slot, and not only a place in the step.
    #
    # The prompt lacks a slot if it has waited longer than a step takes, although the step had room
    # for it beside the running prompts without a first token. Which prompt waits longest is unknown
    # if other gateways send requests too.
    prompts = [
        prompt for prompt in load.reservations if not (prompt.is_decoding or prompt.awaits_kv)
    ]
    begun = max(0, running - load.decoding)
    if begun >= len(prompts) or len(load.reservations) < load.in_flight:
        return False
    if now - prompts[begun].enters_at < LONG_WAIT * load.timeline.decode_s:
        return False
    tokens = sum(prompt.uncached_tokens for prompt in prompts[: begun + 1])
    return tokens <= PART_OF_STEP * load.belief.budget_tokens

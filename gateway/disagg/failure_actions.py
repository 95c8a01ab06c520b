"""What an attempt at a split request does on failure: blame an engine, choose another, free KV.

The actions count the failure against an endpoint, reserve another decode endpoint, or make engines
free KV that is no longer needed. The table in state_machine.py names them. Each action is a
function that changes the attempt's state (attempt_record.py) and does not wait.
"""

from __future__ import annotations

import logging
from time import monotonic

from gateway.disagg.attempt_record import AttemptState
from gateway.disagg.leg import Leg
from gateway.fleet.live_endpoint import LiveEndpoint
from gateway.fleet.reservation import Reservation
from gateway.protocol.response.relay import UpstreamError
from kvtransfer.dialects import (
    DecodeRequest,
    PrefillResponse,
    UnusableResponse,
    parse_response,
)
from policies import routing_algorithm
from policies.pricing.split_decision import EndpointPair, PairGroup

log = logging.getLogger("penstock")

# The failures of a decode endpoint that could not load the KV (vLLM's kv_load_failure_policy:
# fail). It is unknown whether the decode or the prefill endpoint caused them.
KV_FAILURES = frozenset({"status_500", "engine_error"})

# Answers to the first request of a pull that show nothing about other requests: the engine may be
# unable to shorten a prompt or to hand over its beginning.
PULL_FAILURES = frozenset({"status_500", "status_501"})

MOST_EXCESS = 256
"""Maximum prompt tokens by which an answer to a pull's first request may exceed those asked for.

Engines count them in their own ways; one that computes hundreds more has not shortened the prompt.
"""


# Blame


def blame_prefill(attempt: AttemptState) -> None:
    """Count the failure of a split request against the endpoint that computed the prompt (prefill).

    The stored identity of the prefill engine is dropped too, because the engine may have restarted
    with another one. Nothing is counted if the endpoint was only asked for the beginning of a
    prompt and cannot hand it over: it may serve all other requests.
    """
    assert attempt.problem is not None
    if attempt.pair.is_pull and attempt.problem.kind in PULL_FAILURES:
        return
    name = attempt.pair.prefill.candidate.endpoint.name
    if attempt.prefill_reservation is not None:
        attempt.prefill_reservation.on_failed(attempt.problem)
    attempt.handoffs.forget_identity(name)
    attempt.suspects.append(name)


def blame_decode(attempt: AttemptState) -> None:
    """Count the failure of a split request against the endpoint that generates the answer (decode).

    There is one exception. If the decode endpoint could not load the KV cache and the answer has
    not begun, either endpoint may be the cause. Then suspect_both() is called instead.
    """
    problem = attempt.problem
    assert problem is not None
    is_kv_failure = attempt.handover is not None and problem.kind in KV_FAILURES
    if is_kv_failure and not attempt.exchange.is_committed:
        suspect_both(attempt)
    else:
        _blame_decoder(attempt, problem)


def suspect_both(attempt: AttemptState) -> None:
    """Make the next attempt serve the whole request at one endpoint, not at the prefill endpoint.

    It is unknown whether the prefill or the decode endpoint caused the failure. A decode endpoint
    that can serve whole requests may get the next attempt, whose result shows whether that endpoint
    was the cause. For a decode endpoint that cannot, the failure counts against its health, which
    successes with other prefill endpoints restore.
    """
    assert attempt.problem is not None
    name = attempt.pair.prefill.candidate.endpoint.name
    attempt.recompute = True
    attempt.handoffs.forget_identity(
        name
    )  # the decoder may have been given the identity from before a restart
    attempt.suspects.append(name)
    if not attempt.dialect.can_decode_alone:
        _blame_decoder(attempt, attempt.problem)


def _blame_decoder(attempt: AttemptState, problem: UpstreamError) -> None:
    attempt.decode_reservation.on_failed(problem)
    attempt.suspects.append(attempt.pair.decode.candidate.endpoint.name)


# Another decoder


def reserve_other_decode(attempt: AttemptState) -> bool:
    """Reserve capacity at another decode endpoint for a prompt that is already computed.

    Returns False if there is none. The first decode endpoint never received the request, so the
    prefill endpoint still has the prompt's KV cache.
    """
    context, exchange, problem = attempt.context, attempt.exchange, attempt.problem
    assert problem is not None
    if attempt.pair.is_pull:  # the decision was for that endpoint only
        return False
    # These endpoints have failed, even if another decoder succeeds.
    exchange.retries += attempt.suspects
    attempt.suspects = []
    endpoints, request, pair = context.gateway.endpoints, context.call.request, attempt.pair
    decodes = _group_of(attempt).decodes
    others = [candidate for candidate in decodes if candidate is not pair.prefill.candidate]
    query = endpoints.build_query(request, context.fingerprint, exchange.retries)
    pick = routing_algorithm.pick(context.split.splitter.decode, query, others)
    if pick is None or not context.gateway.count_unsent(exchange, problem):
        return False
    attempt.decode_reservation.__exit__()
    attempt.decode_reservation = endpoints.reserve_decode(pick, request, context.fingerprint)
    attempt.decode_reservation.on_handed_over()  # the prompt has been computed
    attempt.pair = EndpointPair(pair.prefill, pick)
    if attempt.transfer is not None:
        attempt.transfer.cancel()
        attempt.transfer = None
    attempt.figures = attempt.handoffs.figures(attempt.pair)
    exchange.pick = pick
    return True


def _group_of(attempt: AttemptState) -> PairGroup:
    decode = attempt.pair.decode.candidate
    return next(group for group in attempt.context.split.pools.groups if decode in group.decodes)


# KV that is not needed any more


def abort_prefill(attempt: AttemptState) -> None:
    """Abort the prefill request of a split request, a short time from now.

    The delay is the time of one engine step. An engine that is aborted during a step finishes the
    step, and then keeps KV that no decode engine knows about. The abort half-closes the connection.
    If the answer arrives in spite of it, a release request makes the engine free that KV.
    """
    leg, inbox = attempt.prefill, attempt.inbox
    if leg is None or inbox is None or leg.is_over or leg.sent_at is None:
        return  # the leg is still connecting; the end of the attempt closes it
    step_s = attempt.figures.step_s
    leg.close_in(2 * step_s, lambda leg, problem: _on_late_answer(attempt, leg, problem))
    attempt.handoffs.outbox.loop.call_later(step_s, inbox.half_close)
    attempt.handoffs.count_leg(("prefill", "closed"))


def _on_late_answer(attempt: AttemptState, leg: Leg, problem: UpstreamError | None) -> None:
    inbox = attempt.inbox
    if problem is not None or inbox is None or leg.relay.is_refused:
        return
    answer = parse_response(inbox.body)
    unusable = refuse_longer_prompt(attempt, answer)
    if unusable is not None:
        name = attempt.pair.prefill.candidate.endpoint.name
        log.warning("the prefill answer of endpoint %s cannot be used: %s", name, unusable.reason)
        return
    meaning = attempt.words.interpret_late(answer)
    if isinstance(meaning, DecodeRequest):
        _release_kv(attempt, meaning, attempt.decode_reservation, "client_gone")


def refuse_longer_prompt(
    attempt: AttemptState, answer: PrefillResponse | UnusableResponse
) -> UnusableResponse | None:
    """Free the KV of a pull's source that has not shortened the prompt, and pause that source.

    Such an engine ignores `truncate_prompt_tokens`: it computes whole prompts, for as long as the
    other endpoint would take. Returns why the answer is refused; None: the prompt is not longer.
    """
    pair = attempt.pair
    if not pair.is_pull or isinstance(answer, UnusableResponse):
        return None
    limit, computed = pair.decode.cached_tokens, answer.prompt_tokens or 0
    if computed <= limit + MOST_EXCESS:
        return None
    meaning = attempt.words.interpret_late(answer)
    if isinstance(meaning, DecodeRequest):
        decode = attempt.decode_reservation
        request = attempt.words.release_request(decode, meaning, is_whole=True)
        attempt.handoffs.send_release_request(decode.upstream, request, "not_shortened")
    source = pair.prefill.candidate.endpoint.name
    attempt.handoffs.pull_pauses.on_failed(source, monotonic(), is_final=True)
    return UnusableResponse(
        f"the prompt had {computed} tokens, although truncate_prompt_tokens was {limit}"
    )


def free_by_decode(attempt: AttemptState) -> None:
    """Close the decode connection, once that makes the prefill engine free the KV.

    An aborted decode engine lets the prefill engine free the KV only if it has read the request, so
    the connection stays open for as long as that takes. A decode request that was never sent is
    replaced by a release request.
    """
    leg, now = attempt.decode, monotonic()
    if leg is None or leg.is_over:
        return
    if not _may_keep_kv(attempt):
        leg.close()
    elif leg.sent_at is None:
        leg.close()
        if attempt.handover is not None:
            _release_kv(attempt, attempt.handover, attempt.decode_reservation, "client_gone")
    else:
        since = leg.sent_at if attempt.record.prefilled_at is not None else now
        leg.close_in(since + attempt.figures.seen_s - now)
    attempt.handoffs.count_leg(("decode", "closed"))


def _may_keep_kv(attempt: AttemptState) -> bool:
    # Return whether the prefill engine may keep KV that only a decode engine can have freed.
    #
    # If not, a decode request must not stay open either: it would wait for KV that is never sent.
    prefill = attempt.prefill
    return prefill is not None and prefill.sent_at is not None and not attempt.dialect.abort_frees


def free_by_refuser(attempt: AttemptState) -> None:
    """Let a decode engine that refused a request as invalid make the prefill engine free its KV.

    For a release request, the decode engine fetches the KV and discards it; then the prefill engine
    frees its copy. The decode engine will accept this request: the prefill engine accepted the same
    prompt, so only another member of the decode request, such as max_tokens, can be invalid.
    """
    if attempt.handover is not None and _may_keep_kv(attempt):
        _release_kv(attempt, attempt.handover, attempt.decode_reservation, "refused")


def free_elsewhere(attempt: AttemptState) -> None:
    """Schedule a request to another decode engine that makes the prefill engine free its KV.

    The failed decode engine may not do this itself. If only its connection broke, it may still be
    fetching the KV, so the request is sent after the time of such a fetch. Nothing is sent if the
    failure was that it could not load the KV: then the prefill engine is gone.
    """
    handover, problem = attempt.handover, attempt.problem
    assert problem is not None
    if handover is None or not attempt.dialect.cache_salt_member or problem.kind in KV_FAILURES:
        return
    loop = attempt.handoffs.outbox.loop
    loop.call_later(attempt.figures.seen_s, _release_elsewhere, attempt, handover)


def _release_elsewhere(attempt: AttemptState, handover: DecodeRequest) -> None:
    # Send a release request to the least busy other decode endpoint of the group.
    #
    # A release request generates one token, so it needs no capacity reservation. A decode endpoint
    # that dies causes many release requests at once, so the running ones count as load.
    pair, handoffs = attempt.pair, attempt.handoffs
    used = (pair.prefill.candidate.load, pair.decode.candidate.load)
    loads = [candidate.load for candidate in _group_of(attempt).decodes]
    available_slots = {load.slot for load in loads if load.is_available and load not in used}
    lives = [
        live
        for live in attempt.context.gateway.endpoints.all()
        if live.load.slot in available_slots
    ]
    other = min(lives, key=handoffs.release_load, default=None)
    if other is not None:
        _release_kv(attempt, handover, other, "decoder_gone")


def _release_kv(
    attempt: AttemptState,
    handover: DecodeRequest,
    reservation: Reservation | LiveEndpoint,
    reason: str,
) -> None:
    request = attempt.words.release_request(reservation, handover)
    attempt.handoffs.send_release_request(reservation.upstream, request, reason)

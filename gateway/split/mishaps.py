"""What is due when a pair's attempt does not go its ordinary way: who is blamed, who else may decode, and who frees KV
that nobody will read. Acts of life.py's table, each done at once, on the attempt that pair.py leads.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from gateway.attempts import is_unsent
from gateway.relay import UpstreamBroke
from gateway.split.life import Event
from kvtransfer.dialects import Handover, read_answer
from policies import run
from policies.split import Pair

if TYPE_CHECKING:
    from gateway.booking import Booking
    from gateway.roster import LiveEndpoint
    from gateway.split.leg import Leg
    from gateway.split.pair import PairAttempt

# A decoder answers so when it could not load the KV (kv_load_failure_policy: fail): whose fault that was, nobody knows.
KV_FAILURES = frozenset({"status_500", "engine_error"})


# Blame


def blame_prefill(attempt: PairAttempt) -> None:
    """Only the guilty leg: its place ends with the failure, its engine may have been restarted."""
    assert attempt.problem is not None
    name = attempt.pair.prefill.candidate.endpoint.name
    if attempt.prefill_place is not None:
        attempt.prefill_place.failed(attempt.problem)
    attempt.handoffs.forget(name)
    attempt.suspects.append(name)


def blame_decode(attempt: PairAttempt) -> None:
    """The decoder, unless it says that it could not load the KV."""
    problem = attempt.problem
    assert problem is not None
    if attempt.handover is not None and problem.kind in KV_FAILURES and not attempt.x.committed:
        blame_nobody(attempt)
    else:
        _blame_decoder(attempt, problem)


def blame_nobody(attempt: PairAttempt) -> None:
    """It may have been either. A decoder that can do without a prefiller is asked again and shows whether it was;
    one that cannot is held to account: success with others clears an innocent one, and a broken one must leave."""
    assert attempt.problem is not None
    name = attempt.pair.prefill.candidate.endpoint.name
    attempt.recompute = True
    attempt.handoffs.forget(name)  # the decoder may have been told of the engine that it was before a restart
    attempt.suspects.append(name)
    if not attempt.dialect.decode_alone:
        _blame_decoder(attempt, attempt.problem)


def _blame_decoder(attempt: PairAttempt, problem: UpstreamBroke) -> None:
    attempt.decode_place.failed(problem)
    attempt.suspects.append(attempt.pair.decode.candidate.endpoint.name)


# Another decoder


def other_decode(attempt: PairAttempt) -> None:
    """The KV waits for whoever asks with the handoff, and this one never reached a decoder: give it to another."""
    work, x, problem, pair = attempt.work, attempt.x, attempt.problem, attempt.pair
    assert problem is not None
    x.retries += attempt.suspects  # it stays on record, whoever answers in the end
    attempt.suspects = []
    endpoints, request = work.gateway.endpoints, work.call.request
    group = next(each for each in work.split.pools.groups if pair.decode.candidate in each.decodes)
    others = [each for each in group.decodes if each is not pair.prefill.candidate]
    pick = run.pick(work.split.splitter.decode, endpoints.ask(request, work.fingerprint, x.retries), others)
    if pick is None or not is_unsent(work.gateway, x, problem):
        attempt.post(Event.NOBODY)
        return
    attempt.decode_place.__exit__()
    attempt.decode_place = endpoints.reserve(pick, request, work.fingerprint)
    attempt.pair = Pair(pair.prefill, pick)
    attempt.figures = attempt.handoffs.figures(attempt.pair)
    x.pick = pick
    attempt.send_decode()


# KV that nobody will read


def call_off_prefill(attempt: PairAttempt) -> None:
    """An engine that is told to abort finishes its step first, and then holds KV that nobody knows of. So its
    answer is waited for as long as a step may take; then it is called off, and what crosses that is still read."""
    leg, inbox = attempt.prefill, attempt.inbox
    if leg is None or inbox is None or leg.over or leg.sent_at is None:
        return  # it was still connecting: the attempt closes it as it ends
    step_s = attempt.figures.step_s
    leg.close_in(2 * step_s, lambda leg, problem: _too_late(attempt, leg, problem))
    attempt.handoffs.outbox.loop.call_later(step_s, inbox.call_off)
    attempt.handoffs.count(("prefill", "closed"))


def _too_late(attempt: PairAttempt, leg: Leg, problem: UpstreamBroke | None) -> None:
    inbox = attempt.inbox
    if problem is not None or inbox is None or leg.relay.refused:
        return
    meaning = attempt.words.meaning(read_answer(inbox.body), alone=True)
    if isinstance(meaning, Handover):
        _give_up(attempt, meaning, attempt.decode_place, "client_gone")


def free_by_decode(attempt: PairAttempt) -> None:
    """A decoder that was cut off before its engine saw the handoff, or before P was done, would tell P nothing."""
    leg, now = attempt.decode, monotonic()
    if leg is None or leg.over:
        return
    if not _kv_may_stay(attempt):
        leg.close()
    elif leg.sent_at is None:
        leg.close()
        if attempt.handover is not None:
            _give_up(attempt, attempt.handover, attempt.decode_place, "client_gone")
    else:
        since = leg.sent_at if attempt.record.prefilled_at is not None else now
        leg.close_in(since + attempt.figures.seen_s - now)
    attempt.handoffs.count(("decode", "closed"))


def _kv_may_stay(attempt: PairAttempt) -> bool:
    """Whether P can be left with KV that only a decoder frees. If not, D would wait for what nobody sends."""
    prefill = attempt.prefill
    return prefill is not None and prefill.sent_at is not None and not attempt.dialect.abort_frees


def free_by_refuser(attempt: PairAttempt) -> None:
    """P had no word against the prompt: what D calls wrong is in what P was not asked (`max_tokens`, `logprobs`)."""
    if attempt.handover is not None and _kv_may_stay(attempt):
        _give_up(attempt, attempt.handover, attempt.decode_place, "refused")


def free_elsewhere(attempt: PairAttempt) -> None:
    """A decoder that is gone may have told P, or not. Another one is asked once the first has surely done with the KV,
    should only its connection have broken. One that says it could not load the KV has found P gone."""
    handover, problem = attempt.handover, attempt.problem
    assert problem is not None
    if handover is not None and attempt.dialect.apart and problem.kind not in KV_FAILURES:
        attempt.handoffs.outbox.loop.call_later(attempt.figures.seen_s, _give_up_elsewhere, attempt, handover)


def _give_up_elsewhere(attempt: PairAttempt, handover: Handover) -> None:
    """Whether there is room for another request does not matter: it is one token."""
    work, pair = attempt.work, attempt.pair
    group = next(each for each in work.split.pools.groups if pair.decode.candidate in each.decodes)
    asked = (pair.prefill.candidate.load, pair.decode.candidate.load)
    able = [each.load for each in group.decodes if each.load.available and each.load not in asked]
    other = next((live for live in work.gateway.endpoints.all() if live.load in able), None)
    if other is not None:
        _give_up(attempt, handover, other, "decoder_gone")


def _give_up(attempt: PairAttempt, handover: Handover, place: Booking | LiveEndpoint, reason: str) -> None:
    attempt.handoffs.give_up(place.upstream, attempt.words.farewell(place, handover), reason)

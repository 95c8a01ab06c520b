"""A request of a model that is split: decide, attempt, and go on elsewhere until somebody has answered it.

The counterpart of serve.py's dispatch for models with a `split`; a pair's own affairs are pair.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from gateway import legs
from gateway.answer import Failure, GatewayError
from gateway.attempts import break_off, nobody, pick_longest, retry
from gateway.client import Client
from gateway.exchange import Exchange, SplitRecord
from gateway.openai import Call
from gateway.relay import UpstreamBroke
from gateway.snapshot import Route
from gateway.split.edit import shape
from gateway.split.pair import PairAttempt
from gateway.split.pairing import SplitRoute
from gateway.split.words import Work
from policies import run
from policies.model import Ask, Candidate, Pick
from policies.split import Decision, Pair, Reason

if TYPE_CHECKING:
    from gateway.serve import Gateway


async def dispatch(gateway: Gateway, split: SplitRoute, x: Exchange, client: Client, route: Route, call: Call) -> None:
    """Serve it by a pair or whole, until somebody answers or nothing is left to try. Raises GatewayError then."""
    fingerprint = x.fingerprint = x.fingerprint or gateway.endpoints.prefixes.of(call, route.name)
    work = Work(gateway, route, split, x, client, call, fingerprint)
    problem: UpstreamBroke | None = None
    recompute = False
    left_out: Sequence[str] = ()
    try:
        while True:
            decision, ask = _decide(work, recompute, left_out)
            if decision.pair is None:
                problem = await _whole(work, ask, decision, problem)
                recompute = False  # that was tried: a pair of others may do better than nobody
            else:
                problem, recompute = await _pair(work, ask, decision.pair)
            if problem is None:
                return None
            if x.committed:
                return break_off(x, client, problem)
            left_out = await retry(gateway, x, problem, partial(_choose, work, recompute))
    finally:
        if x.retrying:
            x.end_retry(gateway.gate)


def _decide(work: Work, recompute: bool, left_out: Sequence[str]) -> tuple[Decision, Ask]:
    handoffs = work.gateway.handoffs
    ask = work.gateway.endpoints.ask(work.call.request, work.fingerprint, left_out)
    decision = _decision(work, ask, recompute)
    handoffs.splitting[work.route.name] = decision.splitting
    handoffs.decided(decision)
    work.x.split = SplitRecord(decision.reason)
    return decision, ask


def _decision(work: Work, ask: Ask, recompute: bool) -> Decision:
    pools = work.split.pools
    mode = work.gateway.handoffs.splitting.get(work.route.name, False)
    if recompute and any(each.load.available for each in pools.alone):
        return Decision(None, Reason.RECOMPUTE, mode)
    return work.split.splitter.decide(pools, ask, shape(work.call.members), mode)


def _choose(work: Work, recompute: bool, left_out: Sequence[str]) -> Sequence[Candidate]:
    """As the choice of an attempt, which it precedes: a pair, or one endpoint for all of it."""
    ask = work.gateway.endpoints.ask(work.call.request, work.fingerprint, left_out)
    pair = _decision(work, ask, recompute).pair
    if pair is not None:
        return pair.prefill.candidate, pair.decode.candidate
    pick = _pick_alone(work, ask)
    return () if pick is None else (pick.candidate,)


def _pick_alone(work: Work, ask: Ask) -> Pick | None:
    """A split request's permit is one and its places are two: one with a permit may find all below their cap taken."""
    alone = work.split.pools.alone
    pick = run.pick(work.route.policy, ask, alone) or run.pick(work.split.splitter.crowded, ask, alone)
    return pick or pick_longest(work.route.policy, ask, alone, work.call)


async def _whole(work: Work, ask: Ask, decision: Decision, problem: UpstreamBroke | None) -> UpstreamBroke | None:
    """One endpoint for all of it; what broke, or None. `problem` is what broke before. Raises GatewayError when nobody
    may."""
    x, route, endpoints, request = work.x, work.route, work.gateway.endpoints, work.call.request
    pick = x.pick = _pick_alone(work, ask)
    if pick is None:
        raise _nobody(work, ask, decision, problem)
    x.picked_at = monotonic()
    work.gateway.accounts.picked(x, route.policy, ask, pick)
    with endpoints.book(pick, request, work.fingerprint) as booking:
        x.booked(route.room, ask, pick)
        try:
            await legs.single(route, x, work.call, work.client, booking)
            return None
        except UpstreamBroke as broke:
            booking.failed(broke)
            x.retries.append(pick.candidate.endpoint.name)
            return broke.with_traceback(None)  # that leads back here, and so to whoever keeps it: a cycle


def _nobody(work: Work, ask: Ask, decision: Decision, problem: UpstreamBroke | None) -> GatewayError:
    if not work.split.pools.alone and decision.reason in (Reason.CHOICES, Reason.PROMPTS, Reason.PROMPT_SCORES):
        message = f"Every request of model '{work.route.name}' is split, and this one cannot be ({decision.reason})."
        return GatewayError(Failure.BAD_REQUEST, message)
    return nobody(work.x, work.route, ask, problem)


async def _pair(work: Work, ask: Ask, pair: Pair) -> tuple[UpstreamBroke | None, bool]:
    """Two endpoints, both places taken in this turn of the loop; what broke, and whether to compute it all in one."""
    x, record = work.x, work.x.split
    assert record is not None
    x.pick, x.picked_at = pair.decode, monotonic()
    record.prefill, record.dialect = pair.prefill.candidate.endpoint.name, work.split.dialect.name
    attempt = PairAttempt(work, pair, record)
    problem = await attempt.run(ask)
    x.retries += attempt.suspects if problem is not None else []
    return problem, attempt.recompute

"""What follows a failed attempt: another one within the fleet's budget, a refusal, or an answer that is broken off.

A retry goes to an endpoint that answers: when an attempt was lost at one endpoint, others may be dead of the same
cause, and a request has few attempts. So before the next one the chosen endpoint is asked for its health, in all three
loops: whole requests (serve.py), split ones (split/dispatch.py) and the rest of a stream (resume/going_on.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from gateway.answer import Failure, GatewayError, stopped
from gateway.client import Client
from gateway.exchange import Exchange
from gateway.relay import STOPPED, UpstreamBroke
from gateway.upstream_error import MODEL_GONE
from policies import run
from policies.filters import below_cap, fits_context, serves_tenant
from policies.model import Ask, Candidate, Pick, Request

if TYPE_CHECKING:
    from gateway.serve import Gateway
    from gateway.snapshot import Route


Choose = Callable[[Sequence[str]], Sequence[Candidate]]
"""The endpoints that would be asked now if these names were left out; empty if there are none."""


async def retry(gateway: Gateway, x: Exchange, broke: UpstreamBroke, choose: Choose) -> Sequence[str]:
    """Wait for leave to try again elsewhere; return the names that the next attempt has to leave out.

    Raises what the client is told when there is no leave.

    Who failed stands in `x.retries` already. An endpoint that never saw the request cost no engine
    anything: it needs no leave, and each endpoint is tried once, so these attempts end. A turn of
    the budget, once taken, is the request's until its answer has begun (hedge.py).
    """
    if broke.kind == STOPPED:
        raise stopped()
    if not is_unsent(gateway, x, broke):
        if x.attempts >= gateway.snapshot.config.retries.attempts:
            raise _given_up(x, broke)
        if not x.retrying:
            x.retrying = await gateway.gate.retry_turn()
            gateway.hedger.retrying.append(x)
        if gateway.gate.stopping:
            raise stopped()
        if not x.retrying:
            raise _given_up(x, broke)
        gateway.accounts.retried(broke.kind)
    return await check_chosen(gateway, x, choose)


async def check_chosen(gateway: Gateway, x: Exchange, choose: Choose) -> Sequence[str]:
    """Return the names to leave out so that the next attempt goes to endpoints that answer their health check.

    Only after an attempt that counts. An endpoint that fails the check costs no attempt. One that is silent is left
    out as long as there are others.
    """
    endpoints, silent = gateway.endpoints, list[str]()
    while x.attempts and (chosen := choose([*x.retries, *silent])):
        answers = await asyncio.gather(*(endpoints.check(each) for each in chosen))
        names = [each.endpoint.name for each in chosen]
        if all(answers):
            others = [live.endpoint.name for live in endpoints.all() if live.endpoint.name not in names]
            if choose(others):
                return others
            silent += names  # no longer available: it was taken out while it was asked
        for name, answer in zip(names, answers, strict=True):
            if answer is None:
                silent.append(name)
            elif not answer:
                x.retries.append(name)
                x.unsent += 1
    return x.retries


_BESIDE_ROOM = (fits_context.__name__, serves_tenant.__name__)  # filters that another endpoint may pass, if a full one


def is_unsent(gateway: Gateway, x: Exchange, broke: UpstreamBroke) -> bool:
    """Count a failed attempt in which the request was never sent; False for any other, or at a stop."""
    if broke.sent or gateway.gate.stopping:
        return False
    x.unsent += 1
    gateway.accounts.retried(broke.kind)
    return True


def crowded(route: Route, ask: Ask) -> Pick | None:
    """Those with room take no prompt so long, are not for its tenant, or do not serve its model: one that does gets it
    beyond its cap, and its engine has it wait.

    Permits are counted by pool, so who has one may find every endpoint taken that its prompt fits. None when it is
    something else that left nobody.
    """
    policy, candidates = route.policy, route.candidates
    refusal = run.refusal(policy, ask, candidates)
    if refusal not in _BESIDE_ROOM and not (route.is_partial and refusal == below_cap.__name__):
        return None
    filters = tuple(keep for keep in policy.filters if keep is not below_cap)
    return run.pick(replace(policy, filters=filters), ask, candidates)


def _given_up(x: Exchange, broke: UpstreamBroke) -> GatewayError:
    if broke.kind == MODEL_GONE:
        message = f"No engine serves the model '{x.model}' any more: {len(x.retries)} answered that it does not exist."
        return GatewayError(Failure.MODEL_NOT_FOUND, message, param="model")
    failure = Failure.UPSTREAM_TIMEOUT if broke.kind == "timeout" else Failure.UPSTREAM_FAILED
    return GatewayError(failure, f"No engine could answer ({broke.kind}); {len(x.retries)} tried.")


def nobody(x: Exchange, route: Route, ask: Ask, broke: UpstreamBroke | None) -> GatewayError:
    """What a client is told when no endpoint may be picked; `broke` is how the last attempt ended, if there was one.

    A request that was sent to no endpoint found none available.
    """
    if broke is not None and x.attempts:
        return _given_up(x, broke)
    own = serves_tenant(ask, route.candidates)
    if route.candidates and not own:
        message = f"No endpoint of model '{route.name}' serves this tenant."
        return GatewayError(Failure.NO_CAPACITY, message, retry_after_s=1.0)
    if own and not fits_context(ask, own):
        return _too_long(ask.request)
    return GatewayError(Failure.NO_CAPACITY, f"No endpoint of model '{route.name}' is available.", retry_after_s=1.0)


def _too_long(request: Request) -> GatewayError:
    """Too long for every endpoint, whoever of them is there."""
    return GatewayError(
        Failure.CONTEXT_TOO_LONG,
        f"No endpoint takes a context of about {request.prompt_tokens + request.output_tokens} tokens "
        f"({request.prompt_tokens} in the prompt, {request.output_tokens} to be generated).",
    )


def break_off(x: Exchange, client: Client, broke: UpstreamBroke) -> None:
    """The answer broke after its first byte: say so in-stream where framing allows it, else hang up."""
    assert x.relay is not None
    if broke.kind == STOPPED:
        rest = x.relay.break_off(Failure.SHUTTING_DOWN, "The gateway stopped while answering. Ask again.")
    else:
        rest = x.relay.break_off(Failure.UPSTREAM_FAILED, f"The engine failed while answering ({broke.kind}).")
    if rest:  # the answer's framing is ended by it: closing as well would only fail the client's next request
        client.write(rest)
    else:
        client.hang_up()
    x.interrupted(broke.kind)

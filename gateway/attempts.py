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
from gateway.media import BYTES_PER_TOKEN, MEDIA_TOKENS, MOST_BYTES_PER_TOKEN
from gateway.openai import Call
from gateway.relay import STOPPED, UpstreamBroke
from gateway.upstream_error import MODEL_GONE
from policies import run
from policies.contract import Policy
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


_BOUNDS = frozenset(("max_tokens", "max_completion_tokens"))
_BESIDE_ROOM = (fits_context.__name__, serves_tenant.__name__)  # filters that another endpoint may pass, if a full one


def is_unsent(gateway: Gateway, x: Exchange, broke: UpstreamBroke) -> bool:
    """Count a failed attempt in which the request was never sent; False for any other, or at a stop."""
    if broke.sent or gateway.gate.stopping:
        return False
    x.unsent += 1
    gateway.accounts.retried(broke.kind)
    return True


def crowded(route: Route, ask: Ask, call: Call) -> Pick | None:
    """Those with room take no prompt so long, are not for its tenant, or do not serve its model: one that does gets it
    beyond its cap, and its engine has it wait.

    Permits are counted by pool, so who has one may find every endpoint taken that its prompt fits. A prompt that is
    too long for all by an estimate alone goes to an endpoint with the longest context. None when it is something else
    that left nobody.
    """
    policy, candidates = route.policy, route.candidates
    refusal = run.refusal(policy, ask, candidates)
    if refusal not in _BESIDE_ROOM and not (route.is_partial and refusal == below_cap.__name__):
        return None
    filters = tuple(keep for keep in policy.filters if keep is not below_cap)
    return run.pick(replace(policy, filters=filters), ask, candidates) or pick_longest(policy, ask, candidates, call)


def pick_longest(policy: Policy, ask: Ask, candidates: Sequence[Candidate], call: Call) -> Pick | None:
    """Pick an endpoint with the longest context for a prompt that is too long for all by an estimate alone.

    The engine counts it and decides. None if some endpoint's context is long enough, or if none can be.
    """
    own = serves_tenant(ask, candidates)
    if not own or fits_context(ask, own) or _is_too_long(call, own):
        return None
    longest = max(each.endpoint.context_tokens or 0 for each in own)
    able = [each for each in own if each.endpoint.context_tokens == longest]
    filters = tuple(keep for keep in policy.filters if keep is not fits_context)
    beyond_caps = tuple(keep for keep in filters if keep is not below_cap)
    return run.pick(replace(policy, filters=filters), ask, able) or run.pick(
        replace(policy, filters=beyond_caps), ask, able
    )


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
    if own and x.call is not None and _is_too_long(x.call, own):
        return _too_long(ask.request)
    return GatewayError(Failure.NO_CAPACITY, f"No endpoint of model '{route.name}' is available.", retry_after_s=1.0)


def _is_too_long(call: Call, candidates: Sequence[Candidate]) -> bool:
    """Whether a prompt and its answer exceed the context of every endpoint, by the fewest tokens that they may have."""
    needed = least_tokens(call)
    return all((most := each.endpoint.context_tokens) is not None and most < needed for each in candidates)


def least_tokens(call: Call) -> int:
    """Return the fewest tokens that one of its prompts and answers may have; images and files may have next to none."""
    request, prompt_tokens = call.request, call.request.prompt_tokens
    if call.estimated_tokens:
        text_bytes = max(0, call.estimated_tokens - call.media * MEDIA_TOKENS) * BYTES_PER_TOKEN
        prompt_tokens = min(prompt_tokens, text_bytes // MOST_BYTES_PER_TOKEN)
    is_bounded = not _BOUNDS.isdisjoint(call.members)
    answer_tokens = request.output_tokens // request.choices if is_bounded else 1
    return prompt_tokens // request.prompts + answer_tokens


def _too_long(request: Request) -> GatewayError:
    """Too long for every endpoint, available or not."""
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

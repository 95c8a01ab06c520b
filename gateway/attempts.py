"""What follows a failed attempt: another one within the fleet's budget, a refusal, or an answer that is broken off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from gateway.answer import Failure, GatewayError, stopped
from gateway.client import Client
from gateway.exchange import Exchange
from gateway.relay import STOPPED, UpstreamBroke
from policies import run
from policies.contract import Policy
from policies.filters import below_cap, fits_context
from policies.model import Ask, Candidate, Pick, Request

if TYPE_CHECKING:
    from gateway.serve import Gateway
    from gateway.snapshot import Route


async def retry(gateway: Gateway, x: Exchange, broke: UpstreamBroke) -> None:
    """Wait for leave to try again elsewhere. Raises what the client is told when there is none.

    Who failed stands in `x.retries` already. A turn of the budget, once taken, is the request's to its end.
    """
    if broke.kind == STOPPED:
        raise stopped()
    if len(x.retries) < gateway.snapshot.config.retries.attempts:
        x.retrying = x.retrying or await gateway.gate.retry_turn()
        if gateway.gate.stopping:
            raise stopped()
        if x.retrying:
            gateway.accounts.retried(broke.kind)
            return
    raise _given_up(x, broke)


def retry_now(gateway: Gateway, x: Exchange, broke: UpstreamBroke) -> bool:
    """As retry(), for who cannot wait: whether there is leave at once."""
    if len(x.retries) < gateway.snapshot.config.retries.attempts:
        x.retrying = x.retrying or gateway.gate.retry_at_once()
        if x.retrying:
            gateway.accounts.retried(broke.kind)
            return True
    return False


def crowded(policy: Policy, ask: Ask, candidates: Sequence[Candidate]) -> Pick | None:
    """Those with room take no prompt so long: one that does gets it beyond its cap, and its engine has it wait.

    Permits are counted by pool, so who has one may find every endpoint taken that its prompt fits. None when it is
    something else that left nobody.
    """
    if run.refusal(policy, ask, candidates) != fits_context.__name__:
        return None
    filters = tuple(keep for keep in policy.filters if keep is not below_cap)
    return run.pick(replace(policy, filters=filters), ask, candidates)


def _given_up(x: Exchange, broke: UpstreamBroke) -> GatewayError:
    failure = Failure.UPSTREAM_TIMEOUT if broke.kind == "timeout" else Failure.UPSTREAM_FAILED
    return GatewayError(failure, f"No engine could answer ({broke.kind}); {len(x.retries)} tried.")


def nobody(x: Exchange, route: Route, ask: Ask, broke: UpstreamBroke | None) -> GatewayError:
    """What a client is told when no endpoint may be picked; `broke` is how the last attempt ended, if there was one."""
    if broke is not None:
        return _given_up(x, broke)
    if route.candidates and not fits_context(ask, route.candidates):
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

"""Converts an endpoint's configuration to what policies use; estimates a new endpoint's speed."""

from __future__ import annotations

from urllib.parse import urlsplit

from msgspec.structs import replace

from gateway.config import Config, EndpointSpec, salt_member
from policies.engine.step_time import NEUTRAL, SpeedBelief, shape_for
from policies.routing_types import Endpoint, Role, TokenPrice
from policies.sizing.parallel_layout import Layout


def to_endpoint(pool: str, spec: EndpointSpec, rank: int | None = None) -> Endpoint:
    """Convert an endpoint's configuration to the Endpoint that routing policies use.

    rank  the data-parallel rank that the Endpoint stands for; None for the whole engine
    """
    layout = spec.layout
    return Endpoint(
        name=spec.display_name if rank is None else f"{spec.display_name}/dp{rank}",
        url=spec.url,
        pool=pool,
        served_model=spec.served_model or "",
        role=Role(spec.role),
        engine=spec.engine,
        layout=Layout(layout.tp, layout.pp, layout.ep, layout.dp),
        labels=dict(spec.labels),
        max_concurrency=spec.max_concurrency,
        bootstrap=_bootstrap(spec),
        context_tokens=spec.context_tokens,
        salt_member=salt_member(spec.engine, spec.cache_salt),
        tenants=frozenset(spec.tenants),
        rank=rank,
        token_price=_token_price(spec),
    )


def _token_price(spec: EndpointSpec) -> TokenPrice | None:
    price = spec.token_price
    if price is None:
        return None
    cached = price.prompt if price.cached is None else price.cached
    return TokenPrice(price.prompt, cached, price.answer)


def _bootstrap(spec: EndpointSpec) -> str | None:
    # Return the bootstrap address; a bare port (":8998") is on the endpoint's own host.
    if spec.bootstrap is None or not spec.bootstrap.startswith(":"):
        return spec.bootstrap
    host = urlsplit(spec.url).netloc.rpartition(":")[0]
    return host + spec.bootstrap


def prior_belief(config: Config, endpoint: Endpoint) -> SpeedBelief:
    """Estimate the speed of a new endpoint, of which nothing has been measured yet.

    The estimate follows from its GPU, its parallel layout, the largest model of its pool, and the
    number of tokens per step that its label states.
    """
    sized = [
        model
        for model in config.models
        if model.pool == endpoint.pool and model.parameters is not None
    ]
    model = max(sized, key=lambda candidate: candidate.parameters or 0.0, default=None)
    params_b = active_b = None
    step_tokens = endpoint.stated_step_tokens or NEUTRAL.budget_tokens
    if model is not None:
        params_b, active_b = model.parameters, model.active_parameters
    elif "gpu" not in endpoint.labels:
        return SpeedBelief(replace(NEUTRAL, budget_tokens=step_tokens))
    tp, pp, gpu = endpoint.layout.tp, endpoint.layout.pp, endpoint.labels.get("gpu")
    return SpeedBelief(shape_for(gpu, tp, pp, params_b, active_b, budget_tokens=step_tokens))

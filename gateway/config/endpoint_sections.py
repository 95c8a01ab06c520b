"""Configuration sections for endpoints: their parallel layout, and the settings of one engine.

An endpoint is one engine process behind one URL, on one or more GPUs (a tensor-parallel group).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field, WrapValidator, field_validator, model_validator

from gateway.config.kv_event_sections import KvEvents, own_host
from gateway.config.tls_sections import EngineTls
from gateway.config.token_price_section import TokenPriceSpec
from gateway.config.value_types import (
    Bootstrap,
    Count,
    Label,
    Name,
    Secret,
    Section,
    Url,
    check_sendable,
    setting,
    without_scheme,
)
from policies.engine_kinds import ENGINE_TRAITS
from policies.routing_types import SLOTS_LABEL, STEP_LABEL, EngineKind, Role


class LayoutSpec(Section):
    """The parallel layout: how one engine process distributes the model over GPUs."""

    tp: Count = setting(1, "Tensor parallel size: number of GPUs that compute each layer together.")
    pp: Count = setting(
        1, "Pipeline parallel size: number of stages that the layers are divided into."
    )
    ep: Count = setting(
        1,
        "Expert parallel size: number of ranks that the experts are distributed over; must "
        "divide tp * dp.",
    )
    dp: Count = setting(
        1, "Data parallel size: number of ranks of the engine that serve different requests."
    )
    domains: tuple[Name, ...] = setting(
        (),
        "Names of the link domains, of hardware.domains, that hold the engine's GPUs: equally "
        "many in each, in whole TP groups. By default, any domain of hardware.link_domain_gpus "
        "GPUs.",
    )


class EndpointTraits(Section):
    """All settings of an endpoint except its name and URL."""

    role: Role = setting(
        "both",
        "Phases of requests that the endpoint serves: prefill, decode, or both (whole requests).",
    )
    bootstrap: Annotated[Bootstrap, WrapValidator(own_host)] | None = setting(
        None,
        "Address of a prefill endpoint's bootstrap server, which decode endpoints connect to "
        "(mooncake, sglang): host:port, or :port on the endpoint's own host.",
    )
    engine: EngineKind = setting(
        "vllm",
        "Kind of engine, which determines its metrics and its extensions of the API. openai is "
        "any other engine or provider with OpenAI's API.",
    )
    served_model: Name | None = setting(
        None,
        "The name by which the engine lists the pool's model at /v1/models; by default the "
        "model's name. In a pool with several models, set served_model of the model instead.",
    )
    layout: LayoutSpec = setting({}, "How the engine distributes the model over GPUs.")
    pin_ranks: Annotated[bool, Field(strict=True)] = setting(
        False,
        "Whether each of the layout.dp data-parallel ranks is an endpoint of its own, NAME/dp0, "
        "NAME/dp1 and so on; max_concurrency and kv_tokens then apply to each rank. vLLM and "
        "SGLang take the rank in the header x-data-parallel-rank.",
    )
    labels: Mapping[Name, Label] = setting(
        {},
        "Free text by name, such as zone. Only endpoints with equal version and kv_dtype labels "
        "form prefill/decode pairs. From gpu (a100, h100, h200, b200, l40s), the endpoint's speed "
        "is estimated before any measurement. From max_num_seqs, the number of sequences that the "
        "engine (each of its ranks) runs at a time, the policy `priced` knows when a request would "
        "wait for one; without it, it learns that number from waiting prompts. From "
        "max_num_batched_tokens, the maximum number of tokens of a step, it knows which prompts an "
        "engine computes together; without it, it assumes 8192.",
    )
    max_concurrency: Count = setting(
        24,
        "Maximum number of requests in progress at the endpoint. Further ones go to another "
        "endpoint or wait in the gateway.",
    )
    api_key: Secret | None = setting(
        None,
        "API key that is sent to the engine as a bearer token. The client's own key is "
        "never sent to an engine.",
    )
    kv_tokens: Count | None = setting(
        None, "Size of the endpoint's KV cache in tokens; by default the engine reports it."
    )
    kv_events: KvEvents | None = setting(
        None,
        "Where the engine publishes KV events, from which the gateway knows exactly which blocks "
        "its prefix cache holds. With {}, the gateway asks the engine. Needs the extra `events`.",
    )
    context_tokens: Count | None = setting(
        None,
        "Maximum number of tokens of prompt plus response, if the endpoint supports fewer than "
        "others of the pool.",
    )
    cache_salt: Annotated[bool, Field(strict=True)] | None = setting(
        None,
        "Whether the engine supports cache salts. By default vllm (0.9 or newer) and sglang "
        "(0.5.3 or newer) do, others do not.",
    )
    tenants: Annotated[tuple[Name, ...], Field(max_length=4096)] = setting(
        (), "Names of the tenants that the endpoint serves; by default it serves all."
    )
    token_price: TokenPriceSpec | None = setting(
        None,
        "What the provider charges for tokens; counted in penstock_cost_usd_total. None by "
        "default.",
    )
    tls: EngineTls | None = setting(
        None, "TLS settings for an https:// URL; by default the system's authorities are trusted."
    )

    _sendable_key = field_validator("api_key")(check_sendable)

    @field_validator("labels")
    @classmethod
    def _states_limits_of_a_step(cls, labels: Mapping[Name, Label]) -> Mapping[Name, Label]:
        for name in (SLOTS_LABEL, STEP_LABEL):
            stated = labels.get(name, "1")
            if not stated.isdecimal() or not int(stated):
                raise ValueError(f"the label {name} must be a positive integer, not {stated!r}")
        return labels

    @model_validator(mode="after")
    def _has_ranks_to_pin(self) -> EndpointTraits:
        traits = ENGINE_TRAITS[self.engine]
        if self.kv_events is not None and not traits.has_kv_events:
            raise ValueError("kv_events requires the engine vllm or sglang")
        if self.pin_ranks and (self.layout.dp < 2 or not traits.takes_rank):
            raise ValueError(
                "pin_ranks requires layout.dp of at least 2, and the engine vllm or sglang"
            )
        if self.pin_ranks and self.role != "both":
            raise ValueError(
                "pin_ranks is possible only for endpoints that serve whole requests (role both)"
            )
        return self


class EndpointSpec(EndpointTraits):
    """One endpoint: an engine process behind one URL, on one or more GPUs."""

    url: Url = Field(
        description="URL of the engine: http or https, host, port, and a path prefix if the "
        "engine has one."
    )
    name: Name | None = setting(
        None, "Name of the endpoint in logs and metrics; by default host:port."
    )

    @model_validator(mode="after")
    def _needs_tls_url(self) -> EndpointSpec:
        if self.tls is not None and not self.url.startswith("https://"):
            raise ValueError("tls requires a url that begins with https://")
        return self

    @property
    def display_name(self) -> str:
        return self.name or without_scheme(self.url)

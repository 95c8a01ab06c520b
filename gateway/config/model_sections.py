"""Configuration sections for models: their pools, split requests, resumption, smaller models."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from gateway.config.value_types import Count, Duration, Name, Parameters, Section, setting
from gateway.config.yaml_source import number_if_substituted


class Split(Section):
    """Settings for split requests: one endpoint computes the prompt, another the answer.

    The first one (prefill) transfers the prompt's KV cache to the second one (decode).
    """

    dialect: Literal["vllm_nixl", "vllm_push", "penstock", "mooncake", "sglang", "trtllm"] = Field(
        description="The protocol by which the engines transfer the KV cache: vllm_nixl, "
        "vllm_push, penstock, mooncake, sglang or trtllm."
    )
    threshold_tokens: Count = setting(
        2048,
        "Minimum number of uncached prompt tokens for splitting a request. Tokens are uncached if "
        "they are not in the prefix cache of the decode endpoint.",
    )
    hysteresis: Annotated[float, Field(ge=0, lt=1)] = setting(
        0.25,
        "Hysteresis of the threshold, as a share of it (0 to 1). Splitting begins at threshold * "
        "(1 + hysteresis) and ends below threshold * (1 - hysteresis).",
    )
    transfer_timeout: Duration = setting(
        "30s",
        "Maximum time from the end of the prefill to the first token of a split request. After "
        "it, one endpoint serves the request from its start. Ten times the expected time of the "
        "answer is added if it is not a stream, as its first token is not seen.",
    )
    pull: bool = setting(
        True,
        "Whether an endpoint may fetch the cached beginning of a prompt from another one and "
        "compute the rest, where the policy expects that to cost less. Only with the dialect "
        "penstock and a policy that compares prices.",
    )


class Resume(Section):
    """Settings for continuing a broken stream on another endpoint, without losing tokens."""

    attempts: Annotated[
        int, Field(strict=True, ge=2, le=8), BeforeValidator(number_if_substituted)
    ] = setting(
        3,
        "Maximum number of endpoints that may generate parts of one response, the first included.",
    )
    tokens: Count = setting(
        32768,
        "Maximum number of prompt and response tokens (4 bytes each) that are recorded to "
        "continue a broken stream. A longer stream is not continued.",
    )


class Overflow(Section):
    """A smaller model that may serve requests that would otherwise be refused."""

    model: Name = Field(description="Name of the smaller model; it must be in the list `models`.")
    penalty: Annotated[float, Field(ge=0, lt=1), BeforeValidator(number_if_substituted)] = setting(
        0.3,
        "Share of a request's worth that is lost when the smaller model serves it (0 to 1). The "
        "model with the lowest penalty is tried first.",
    )


class Model(Section):
    """A model that applications can request by name, and the pool that serves it."""

    name: Name = Field(
        description="Name of the model that clients send in requests, and that /v1/models lists."
    )
    aliases: tuple[Name, ...] = setting(
        (),
        "Other names for the same model; a response contains the name that was requested. A name "
        "with one * is a pattern, as in claude-*: exact names win, then the longest pattern.",
    )
    pool: Name = Field(description="The pool whose endpoints serve the model.")
    served_model: Name | None = setting(
        None,
        "Name by which the engines list the model at /v1/models; by default `name`. In a pool "
        "with several models, only this setting can give it.",
    )
    context_tokens: Count | None = setting(
        None,
        "Maximum number of tokens of prompt plus response. The gateway refuses requests for more.",
    )
    split: Split | None = setting(
        None,
        "How requests are split between prefill and decode endpoints. By default they are "
        "not split.",
    )
    resume: Resume | None = setting(
        None,
        "How broken streams are continued on another endpoint (vLLM only). By default they end "
        "with an error.",
    )
    slo: Name | None = setting(
        None,
        "Service class of the model's requests that name none; by default that of slo.default.",
    )
    overflow: Annotated[tuple[Overflow, ...], Field(max_length=8)] = setting(
        (),
        "Smaller models that serve requests which this model's pool would refuse; such responses "
        "have the header x-penstock-tier. None by default.",
    )
    parameters: Parameters | None = setting(
        None,
        "The model's number of parameters, from which its speed is estimated before any "
        "measurement.",
    )
    active_parameters: Parameters | None = setting(
        None,
        "Number of model parameters that one token uses (mixture of experts); all of them by "
        "default.",
    )

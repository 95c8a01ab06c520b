"""Sections for models, and for splitting, resuming and overflowing their requests."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from gateway.config.values import Count, Duration, Name, Parameters, Section, setting
from gateway.config.yaml_source import number_if_substituted


class Split(Section):
    """Prefill and decode on different endpoints, with the KV cache handed over between them."""

    dialect: Literal["vllm_nixl", "vllm_push", "mooncake", "sglang", "trtllm"] = Field(
        description="The handoff protocol of its engines: vllm_nixl, vllm_push, mooncake, sglang "
        "or trtllm."
    )
    threshold_tokens: Count = setting(
        2048, "Number of prompt tokens not cached at the decoder from which a request is split."
    )
    hysteresis: Annotated[float, Field(ge=0, lt=1)] = setting(
        0.25,
        "Half the width of the band around the threshold, as a share of it, in which the mode "
        "does not change.",
    )
    transfer_timeout: Duration = setting(
        "30s",
        "Time from the end of the prefill to the first token; after it the request is recomputed "
        "on one endpoint.",
    )


class Resume(Section):
    """Streams whose engine fails are continued by another endpoint, token for token."""

    attempts: Annotated[
        int, Field(strict=True, ge=2, le=8), BeforeValidator(number_if_substituted)
    ] = setting(3, "Maximum number of endpoints for one response, including the first.")
    tokens: Count = setting(
        32768,
        "Tokens of prompt and response recorded for it, four bytes each; a longer stream is not "
        "continued.",
    )


class Overflow(Section):
    """A smaller model that may serve requests which would otherwise be refused."""

    model: Name = Field(description="Its name in the list of models.")
    penalty: Annotated[float, Field(ge=0, lt=1), BeforeValidator(number_if_substituted)] = setting(
        0.3,
        "Share of a request's worth that is lost by serving it there; the lowest is tried first.",
    )


class Model(Section):
    """A model name that applications can request."""

    name: Name = Field(description="The name applications send and see in /v1/models.")
    aliases: tuple[Name, ...] = setting(
        (),
        "Other names for the same model; a response contains the name that was requested. A name "
        "with one * is a pattern, as in claude-*: exact names win, then the longest pattern.",
    )
    pool: Name = Field(description="The pool whose endpoints serve it.")
    served_model: Name | None = setting(
        None,
        "The engines' name of it, as they list it at /v1/models; `name` by default. In a pool with "
        "several models, only this setting can give it.",
    )
    context_tokens: Count | None = setting(
        None, "Maximum of prompt plus response; the gateway refuses longer requests."
    )
    split: Split | None = setting(
        None, "How to split requests between prefill and decode endpoints; not split by default."
    )
    resume: Resume | None = setting(
        None,
        "How broken streams are continued on another endpoint (vLLM only). By default they end "
        "with an error.",
    )
    slo: Name | None = setting(
        None, "Service class of requests that name none; slo.default by default."
    )
    overflow: Annotated[tuple[Overflow, ...], Field(max_length=8)] = setting(
        (),
        "Models that serve what this one's pool would refuse, marked by the header "
        "x-penstock-tier. None by default.",
    )
    parameters: Parameters | None = setting(
        None, "Its size, to estimate its speed before any measurement."
    )
    active_parameters: Parameters | None = setting(
        None, "Parameters used for one token; all of them by default."
    )

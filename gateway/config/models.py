"""Model names and what may be done with their requests, as sections of the configuration: split, resume, overflow."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from gateway.config.source import number_if_substituted
from gateway.config.values import Count, Duration, Name, Parameters, Section, setting


class Split(Section):
    """Prefill and decode in different TP groups, the KV cache handed over between them."""

    dialect: Literal["vllm_nixl", "vllm_push", "mooncake", "sglang", "trtllm"] = Field(
        description="The handoff its engines speak: vllm_nixl, vllm_push, mooncake, sglang or trtllm."
    )
    threshold_tokens: Count = setting(
        2048, "Prompts are split from so many tokens on that are not cached at the decoder."
    )
    hysteresis: Annotated[float, Field(ge=0, lt=1)] = setting(
        0.25, "Half the width of the band around the threshold, as a share of it, in which the mode stays as it was."
    )
    transfer_timeout: Duration = setting(
        "30s", "From the prefill's end to the first token; then the request is computed whole."
    )


class Resume(Section):
    """Streams whose engine breaks in mid-answer are continued by another, token for token."""

    attempts: Annotated[int, Field(strict=True, ge=2, le=8), BeforeValidator(number_if_substituted)] = setting(
        3, "Most endpoints that one answer comes from, the first included."
    )
    tokens: Count = setting(
        32768, "Tokens of prompt and answer that are kept for it, four bytes each; a longer stream is not continued."
    )


class Overflow(Section):
    """A smaller model that may serve what would be refused."""

    model: Name = Field(description="Its name among the models.")
    penalty: Annotated[float, Field(ge=0, lt=1), BeforeValidator(number_if_substituted)] = setting(
        0.3, "The share of a request's worth that is lost by serving it there; the least is tried first."
    )


class Model(Section):
    """A model name that applications may ask for."""

    name: Name = Field(description="The name applications send and see in /v1/models.")
    aliases: tuple[Name, ...] = setting(
        (), "Other names for the same model; an answer carries the name that was asked for."
    )
    pool: Name = Field(description="The pool whose endpoints serve it.")
    served_model: Name | None = setting(
        None,
        "The name that its engines list at /v1/models, where that is not `name`. In a pool with "
        "several models there is no other way to give it.",
    )
    context_tokens: Count | None = setting(None, "Longest prompt plus answer; longer requests are refused at the door.")
    split: Split | None = setting(None, "How to split it between prefill and decode endpoints; whole unless given.")
    resume: Resume | None = setting(
        None, "How streams that break are continued elsewhere, by vLLM's engines; they end with an error unless given."
    )
    slo: Name | None = setting(None, "The service class of requests that name none; slo.default unless given.")
    overflow: Annotated[tuple[Overflow, ...], Field(max_length=8)] = setting(
        (), "Who serves what its own pool would refuse; an answer says so in x-penstock-tier. Nobody unless given."
    )
    parameters: Parameters | None = setting(None, "Its size, for expecting its speed before anything was observed.")
    active_parameters: Parameters | None = setting(None, "What one token touches of it; all of it unless given.")

    @model_validator(mode="after")
    def _one_way(self) -> Model:
        if self.split is not None and self.resume is not None:
            raise ValueError("streams of a model that is split are not continued: leave out split or resume")
        return self

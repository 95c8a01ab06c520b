"""Configuration section for a pool: its policies, its endpoints and its queue."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from gateway.config.auto_section import AutoPolicy, without_auto_name
from gateway.config.discovery_sections import Discover
from gateway.config.endpoint_sections import EndpointSpec
from gateway.config.mirror_section import Mirror
from gateway.config.policy_sections import (
    AdmissionChoice,
    Canary,
    PolicyChoice,
    with_policy_of_roles,
)
from gateway.config.value_types import Duration, Section, setting
from gateway.config.yaml_source import number_if_substituted
from policies import admission_registry
from policies.default_policy import DEFAULT_POLICY


class WaitingRoom(Section):
    """The queue of requests that wait while all endpoints of the pool are at max_concurrency."""

    size: Annotated[
        int, Field(strict=True, ge=0, le=2**20), BeforeValidator(number_if_substituted)
    ] = setting(
        256,
        "Maximum number of waiting requests; further ones get 429. With 0, requests never wait.",
    )
    timeout: Duration = setting("30s", "Maximum time that a request waits before it gets 429.")


class Pool(Section):
    """A pool: endpoints that serve the same models, and the policy that picks among them."""

    policy: PolicyChoice = setting(
        DEFAULT_POLICY,
        "Name of the routing policy, or a mapping of name and parameters. A pool with an endpoint "
        "of the role prefill or decode has the policy prefix_aware by default. `auto` means the "
        "default policy together with the section `auto`.",
    )
    auto: AutoPolicy | None = setting(
        None,
        "How to choose the routing policy by replaying recent requests. By default the policy "
        "does not change.",
    )
    shadow: Annotated[tuple[PolicyChoice, ...], Field(max_length=8)] = setting(
        (),
        "Policies that also pick an endpoint for each request, only for comparison; nothing is "
        "sent to these picks.",
    )
    mirror: Mirror | None = setting(
        None,
        "How answers to live requests are compared with those of another pool; not by default.",
    )
    canary: Canary | None = setting(
        None, "A routing policy on trial that serves part of the pool's requests; none by default."
    )
    admission: AdmissionChoice = setting(
        admission_registry.DEFAULT,
        "Name of the admission policy, or a mapping of name and parameters.",
    )
    endpoints: Annotated[tuple[EndpointSpec, ...], Field(max_length=4096)] = setting(
        (), "The endpoints of the pool. The list may be empty if endpoints are discovered."
    )
    discover: Discover | None = setting(None, "Source of further endpoints; none by default.")
    waiting_room: WaitingRoom = setting({}, "The queue for requests while no endpoint is free.")
    native_apis: tuple[Literal["messages", "responses"], ...] | None = setting(
        None,
        "Which of the APIs messages and responses all engines of the pool support; requests to "
        "the others are translated to chat completions. By default the engines' /openapi.json "
        "decides.",
    )

    _policy_of_roles = model_validator(mode="before")(with_policy_of_roles)
    _auto_name = model_validator(mode="before")(without_auto_name)

"""Configuration sections for tenants: clients with API keys, limits and isolated cached prompts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator

from gateway.config.value_types import Count, Name, Secret, Section, Weight, check_sendable, setting
from gateway.config.yaml_source import number_if_substituted

MIN_SECRET_CHARS = 16


class TenantLimits(Section):
    """Limits on the requests of a tenant. A request above them gets status 429.

    If several gateways share state, a limit applies to the sum of the requests at all of them.
    """

    requests_per_minute: Count | None = setting(
        None, "Maximum number of the tenant's requests per minute; unlimited by default."
    )
    tokens_per_minute: Count | None = setting(
        None,
        "Maximum number of the tenant's prompt and response tokens per minute. While a response "
        "is in progress, its expected length counts. Unlimited by default.",
    )
    concurrent_requests: Count | None = setting(
        None,
        "Maximum number of the tenant's requests in progress, from the parsed body to the end of "
        "the response, also of one in the background. Requests of batches, and those that compute "
        "no tokens, do not count. "
        "Unlimited by default.",
    )


class ScopedKey(Section):
    """A further API key of a tenant that is valid for some models only."""

    key: Secret = Field(
        description="An API key of the tenant, written as a reference: ${NAME} or ${file:/path}."
    )
    models: Annotated[tuple[Name, ...], Field(min_length=1, max_length=256)] = Field(
        description="The model names that the key is valid for, including aliases and patterns "
        "(claude-*). Clients with the key do not see other models."
    )

    _sendable_key = field_validator("key")(check_sendable)


class Tenant(Section):
    """A client with its own API keys. If no tenants are configured, the API needs no key."""

    name: Name = Field(description="Name of the tenant in logs and metrics.")
    key: Secret = Field(
        description="API key of the tenant, written as a reference: ${NAME} or ${file:/path}."
    )
    keys: Annotated[tuple[Secret, ...], Field(max_length=8)] = setting(
        (),
        "Further API keys of the tenant, for example while a key is being replaced; by reference.",
    )
    models: Annotated[tuple[Name, ...], Field(max_length=256)] = setting(
        (),
        "Names of the models that `key` and `keys` are valid for, with aliases and patterns "
        "as in scoped_keys; all by default.",
    )
    scoped_keys: Annotated[tuple[ScopedKey, ...], Field(max_length=64)] = setting(
        (), "Further API keys of the tenant, each valid only for the models listed with it."
    )
    cache_group: Name | None = setting(
        None,
        "Name of a group of tenants that share cached prompts; a tenant without a group shares "
        "with no other.",
    )
    slo: Name | None = setting(None, "Service class of the tenant's requests that do not name one.")
    weight: Weight = setting(
        1.0, "The tenant's share of an overloaded pool, relative to the weights of other tenants."
    )
    priority: Annotated[
        int, Field(strict=True, ge=-8, le=8), BeforeValidator(number_if_substituted)
    ] = setting(
        0, "Highest priority that the tenant's requests may have; a higher one is lowered to this."
    )
    limits: TenantLimits = setting({}, "Limits on the tenant's requests; none by default.")
    mirror: Annotated[bool, Field(strict=True)] = setting(
        True,
        "Whether a mirror may compare answers to the tenant's requests. Never with cache.isolate: "
        "required.",
    )

    _sendable_key = field_validator("key")(check_sendable)

    @field_validator("keys")
    @classmethod
    def _sendable_keys(cls, keys: tuple[Secret, ...]) -> tuple[Secret, ...]:
        for key in keys:
            check_sendable(key)
        return keys


class Cache(Section):
    """Settings that determine which tenants may share cached prompts on the engines."""

    isolate: Literal["on", "required", "off"] = setting(
        "on",
        "on: each tenant (or group) has its own cache salt; check and doctor name engines that do "
        "not support one. required: an engine without cache salts may serve only one tenant. off: "
        "all tenants share cached prompts.",
    )
    secret: Secret | None = setting(
        None,
        "Secret that cache salts are derived from, by reference; at least 16 characters, equal on "
        "all gateways. Default: shared.key, else the tenants' API keys.",
    )

    @field_validator("isolate", mode="before")
    @classmethod
    def _from_bool(cls, value: object) -> object:
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value

    @field_validator("secret")
    @classmethod
    def _long_enough(cls, secret: Secret | None) -> Secret | None:
        if secret is not None and len(secret.reveal()) < MIN_SECRET_CHARS:
            raise ValueError(
                f"the secret is too short; it must have at least {MIN_SECRET_CHARS} characters, "
                "so that it cannot be guessed"
            )
        return secret

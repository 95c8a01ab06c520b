"""Tenants, and how engines' prompt caches are kept apart between them. Rules between values are isolation.py's."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator

from gateway.config.source import number_if_substituted
from gateway.config.values import Count, Name, Secret, Section, Weight, sendable, setting

LEAST_SECRET = 16


class TenantLimits(Section):
    """What a tenant may ask for per minute, of all gateways with one view together; more is 429."""

    requests_per_minute: Count | None = setting(None, "Requests; as many as it likes unless given.")
    tokens_per_minute: Count | None = setting(
        None,
        "Tokens of prompts and answers, answers as expected until they are there; unlimited unless given.",
    )


class Tenant(Section):
    """One client with keys of its own. Without tenants the API is open to whoever can reach it."""

    name: Name = Field(description="How logs and metrics call it.")
    key: Secret = Field(description="Its API key, by reference: ${NAME} or ${file:/path}.")
    keys: Annotated[tuple[Secret, ...], Field(max_length=8)] = setting(
        (), "Further API keys that are valid as well, as while a key is replaced; by reference."
    )
    cache_group: Name | None = setting(
        None,
        "Tenants that name the same group share cached prompts; a tenant without one shares with no other.",
    )
    slo: Name | None = setting(None, "The service class of its requests that name none.")
    weight: Weight = setting(
        1.0, "Its share of a pool that many want at once, in relation to other tenants."
    )
    priority: Annotated[
        int, Field(strict=True, ge=-8, le=8), BeforeValidator(number_if_substituted)
    ] = setting(0, "Highest priority that its requests may claim; more counts as this.")
    limits: TenantLimits = setting({}, "What it may ask for per minute.")

    _sendable_key = field_validator("key")(sendable)

    @field_validator("keys")
    @classmethod
    def _sendable_keys(cls, keys: tuple[Secret, ...]) -> tuple[Secret, ...]:
        for key in keys:
            sendable(key)
        return keys


class Cache(Section):
    """Whose requests may share cached prompts on the engines."""

    isolate: Literal["on", "required", "off"] = setting(
        "on",
        "on: every tenant has a cache salt of its own, and engines that take none are named by check and doctor. "
        "required: such an engine may serve one tenant only. off: all tenants share.",
    )
    secret: Secret | None = setting(
        None,
        "What cache salts are derived from, by reference; 16 characters or more, the same for all gateways. Unless "
        "given, shared.key, and without that the tenants' API keys.",
    )

    @field_validator("isolate", mode="before")
    @classmethod
    def _word(cls, value: object) -> object:
        """YAML 1.1 tools, which write on and off as booleans, mean the words."""
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value

    @field_validator("secret")
    @classmethod
    def _long_enough(cls, secret: Secret | None) -> Secret | None:
        if secret is not None and len(secret.reveal()) < LEAST_SECRET:
            raise ValueError(
                f"is shorter than {LEAST_SECRET} characters, which is too easily guessed"
            )
        return secret

"""What the gateway writes about itself, as sections of the configuration: access log, explanations, traces."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, StringConstraints, field_validator

from gateway.config.source import number_if_substituted
from gateway.config.values import CollectorUrl, Duration, Secret, Section, Size, sendable, setting

LEAST_LOG_BYTES = 64 << 10


class Traces(Section):
    """Traces of requests for an OpenTelemetry collector. Never a prompt, a header or a key in them."""

    endpoint: CollectorUrl = Field(
        description="Where to, OTLP over HTTP: http://127.0.0.1:4318/v1/traces or so."
    )
    ratio: Annotated[float, Field(ge=0, le=1), BeforeValidator(number_if_substituted)] = setting(
        0.01,
        "Share of requests that are traced. One that comes with a traceparent is if that says so, and only then.",
    )
    key: Secret | None = setting(None, "What the collector wants as a bearer token, by reference.")

    _sendable_key = field_validator("key")(sendable)


class Rotate(Section):
    """When the file of the access log begins again. Older files are called FILE.1 (the newest), FILE.2 and so on."""

    size: Size = setting("100MiB", "Bytes at which a new file begins.")
    keep: Annotated[
        int, Field(strict=True, ge=1, le=1000), BeforeValidator(number_if_substituted)
    ] = setting(5, "Older files that are kept; the oldest one is deleted.")

    @field_validator("size")
    @classmethod
    def _large_enough(cls, size: int) -> int:
        if size < LEAST_LOG_BYTES:
            raise ValueError(
                f"is too small for a log file; it must be at least {LEAST_LOG_BYTES >> 10}KiB"
            )
        return size


class OperatorLog(Section):
    """What the gateway tells its operator, on stderr."""

    format: Literal["text", "json"] = setting(
        "text", "Lines for people, or one JSON object per line."
    )
    level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "Least severe lines that are written."
    )


class Observability(Section):
    """What the gateway writes about itself."""

    access_log: Annotated[str, StringConstraints(min_length=1, max_length=4096)] = setting(
        "stdout", "One JSON line per request to stdout, off, or the path of a file."
    )
    access_flush: Duration = setting(
        "200ms", "Longest time a line waits to be written with others."
    )
    access_blocks: Annotated[bool, Field(strict=True)] = setting(
        False,
        "Whether lines tell the keys of prompts' blocks, so that a replay knows what prompts had in common.",
    )
    access_rotate: Rotate | None = setting(
        None,
        "When to begin a new file of the access log; never unless set, so that logrotate can do it.",
    )
    log: OperatorLog = setting({}, "The operator's log on stderr.")
    tenants: Annotated[bool, Field(strict=True)] = setting(
        False, "Whether penstock_goodput_total tells tenants apart, up to 64 of them."
    )
    explained: Annotated[
        int, Field(strict=True, ge=0, le=65536), BeforeValidator(number_if_substituted)
    ] = setting(512, "Newest requests whose routing /explain/{id} of the admin server can tell.")
    traces: Traces | None = setting(None, "Where traces go; nobody is traced unless given.")

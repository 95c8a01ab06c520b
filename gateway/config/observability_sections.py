"""Configuration sections for the gateway's access log, operator log and traces."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, StringConstraints, field_validator

from gateway.config.value_types import (
    CollectorUrl,
    Duration,
    Secret,
    Section,
    Size,
    check_sendable,
    setting,
)
from gateway.config.yaml_source import number_if_substituted

MIN_LOG_BYTES = 64 << 10


class Traces(Section):
    """Settings of request traces, which are sent to an OpenTelemetry collector.

    Traces contain no prompts, headers or keys.
    """

    endpoint: CollectorUrl = Field(
        description="URL of the trace collector (OTLP over HTTP), for example "
        "http://127.0.0.1:4318/v1/traces."
    )
    ratio: Annotated[float, Field(ge=0, le=1), BeforeValidator(number_if_substituted)] = setting(
        0.01,
        "Share of requests that are traced (0 to 1). A request with a traceparent header is "
        "traced only if that header says that it is sampled.",
    )
    key: Secret | None = setting(
        None, "Bearer token for the trace collector, by reference: ${NAME} or ${file:/path}."
    )

    _sendable_key = field_validator("key")(check_sendable)


class LogRotation(Section):
    """When the access log begins a new file, and how many older files are kept.

    Older files are named FILE.1 (the newest), FILE.2, ...
    """

    size: Size = setting("100MiB", "Size at which the access log begins a new file.")
    keep: Annotated[
        int, Field(strict=True, ge=1, le=1000), BeforeValidator(number_if_substituted)
    ] = setting(5, "Number of older access log files that are kept.")

    @field_validator("size")
    @classmethod
    def _large_enough(cls, size: int) -> int:
        if size < MIN_LOG_BYTES:
            raise ValueError(
                f"the size of a log file must be at least {MIN_LOG_BYTES >> 10}KiB, not {size} "
                "bytes"
            )
        return size


class OperatorLog(Section):
    """Settings of the gateway's own log messages, which go to stderr."""

    format: Literal["text", "json"] = setting(
        "text", "Format of the log: plain text lines, or one JSON object per line."
    )
    level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "Lowest severity of messages that are written to the log."
    )


class Observability(Section):
    """Settings for what the gateway reports about itself: access log, log and traces."""

    access_log: Annotated[str, StringConstraints(min_length=1, max_length=4096)] = setting(
        "stdout",
        "Where the access log (one JSON line per request) is written: stdout, off, or "
        "the path of a file.",
    )
    access_flush: Duration = setting(
        "200ms",
        "Maximum time that lines of the access log are collected before they are written together.",
    )
    access_blocks: Annotated[bool, Field(strict=True)] | None = setting(
        None,
        "Whether lines contain keyed hashes of prompt blocks, from which a replay knows which "
        "prompts of a tenant share a prefix. By default only in pools whose policy uses prefixes.",
    )
    access_rotate: LogRotation | None = setting(
        None,
        "When to begin a new file of the access log. By default never; logrotate can do it "
        "instead.",
    )
    log: OperatorLog = setting({}, "The gateway's own log messages, on stderr.")
    tenants: Annotated[bool, Field(strict=True)] = setting(
        False,
        "Whether penstock_goodput_total has a label for the tenant; at most 64 tenants get "
        "their own value.",
    )
    explained: Annotated[
        int, Field(strict=True, ge=0, le=65536), BeforeValidator(number_if_substituted)
    ] = setting(
        512,
        "Number of most recent requests that the admin page /explain/{id} can explain. Of "
        "requests without a problem, 64 per second are kept after a burst.",
    )
    traces: Traces | None = setting(
        None, "The collector that receives request traces; by default no request is traced."
    )

"""Configuration sections for health checks, and for scrapes of the engines' metrics pages."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from gateway.config.value_types import Count, Duration, HttpPath, Interval, Section, setting


class HealthSpec(Section):
    """Settings of health checks: when an endpoint leaves rotation, and when it returns."""

    interval: Interval = setting(
        "1s",
        "Time between two probes of an endpoint (at most 1s while it is ejected). An answer to a "
        "request replaces a probe. Endpoints without requests get at most 256 probes per second "
        "in total.",
    )
    timeout: Duration = setting("1s", "Maximum time for an engine to answer a probe.")
    failures: Count = setting(
        3,
        "Number of consecutive failures, of probes or requests, after which an endpoint is "
        "ejected.",
    )
    backoff: Duration = setting(
        "1s",
        "Duration of the first ejection. It doubles, with random variation, each time the "
        "endpoint fails again after its return.",
    )
    backoff_max: Duration = setting("60s", "Maximum duration of an ejection.")
    slow_start: Duration = setting(
        "10s",
        "Time in which a new or returned endpoint gets fewer concurrent requests, as long as "
        "other endpoints have capacity.",
    )
    slow_factor: Annotated[float, Field(ge=0, le=100)] = setting(
        2.5,
        "An endpoint is ejected as slow if it takes this many times as long as its peers for the "
        "same work. 0 turns this off. Peers have the same role, engine, layout and label `gpu`.",
    )
    path: HttpPath = setting("/health", "HTTP path of health probes.")
    progress: Duration = setting(
        "5s",
        "Time without output, while requests are in progress, after which an engine counts as "
        "stalled. It is longer while long prompts are computed, and for engines without metrics. "
        "Only engines that generate a test token beside running requests are checked: vllm, "
        "sglang, trtllm and tgi.",
    )

    @model_validator(mode="after")
    def _is_consistent(self) -> HealthSpec:
        if self.backoff > self.backoff_max:
            raise ValueError(
                f"backoff ({self.backoff:g}s) must not be longer than backoff_max "
                f"({self.backoff_max:g}s)"
            )
        if 0 < self.slow_factor < 1.5:
            raise ValueError(
                "slow_factor must be at least 1.5, because equally fast endpoints can differ by "
                "less than that by chance"
            )
        return self


class Scrape(Section):
    """Settings for scraping: reading the engines' load from their metrics pages."""

    interval: Interval = setting(
        "1s",
        "Time between two scrapes of an endpoint with requests; without requests, three "
        "times as long.",
    )
    timeout: Duration = setting("1s", "Maximum time for an engine to send its metrics page.")
    stale: Duration = setting("5s", "Age of a scrape from which its values are not used any more.")

"""Configuration sections about changes of the running configuration: reload and automatic
rollback.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from gateway.config.values import Count, Duration, Section, setting


class AutoRollback(Section):
    """Settings for automatically undoing a configuration change after which more requests fail."""

    window: Duration = setting(
        "60s",
        "Time after a configuration change in which failed requests are compared with those of the "
        "same time before it.",
    )
    error_ratio: Annotated[float, Field(gt=0, le=1)] = setting(
        0.05,
        "Allowed increase of the share of failed requests after a configuration change: 0.05 is "
        "five of a hundred.",
    )
    requests: Count = setting(
        50, "Minimum number of requests after a configuration change before the change is judged."
    )


class Reload(Section):
    """Settings for reloading this file: when to reload, and what to check and keep."""

    watch: Annotated[bool, Field(strict=True)] = setting(
        True,
        "Whether changes of the configuration file, and of files that it names, take effect "
        "automatically.",
    )
    state_dir: Annotated[str, StringConstraints(min_length=1, max_length=4096)] | None = setting(
        None,
        "Folder that keeps the last 20 configuration versions over restarts; by default they are "
        "in memory only.",
    )
    auto_rollback: AutoRollback | None = setting(
        None, "When a configuration change is undone automatically; never by default."
    )

"""Configuration sections for reloading the configuration, and for automatic rollback."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from gateway.config.value_types import Count, Duration, Section, setting


class AutoRollback(Section):
    """Settings for undoing a configuration change automatically if more requests fail after it."""

    window: Duration = setting(
        "60s",
        "Length of the periods before and after a configuration change whose failed requests are "
        "compared.",
    )
    error_ratio: Annotated[float, Field(gt=0, le=1)] = setting(
        0.05,
        "Increase of the share of failed requests that is tolerated after a change: 0.05 is five "
        "more in a hundred.",
    )
    requests: Count = setting(
        50, "Minimum number of requests after a configuration change before it can be undone."
    )


class Reload(Section):
    """Settings for reloading the configuration file: when to reload, and what to check and keep."""

    watch: Annotated[bool, Field(strict=True)] = setting(
        True,
        "Whether the gateway applies changes of the configuration file, and of files that it "
        "names, automatically.",
    )
    state_dir: Annotated[str, StringConstraints(min_length=1, max_length=4096)] | None = setting(
        None,
        "Folder in which the last 20 configuration versions are kept over restarts; by default "
        "they are kept in memory only.",
    )
    auto_rollback: AutoRollback | None = setting(
        None, "When a configuration change is undone automatically; never by default."
    )

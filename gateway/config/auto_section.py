"""The configuration section `auto`: the gateway chooses a pool's routing policy itself.

It replays recent requests with several policies, and compares how many meet their latency targets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from gateway.config.policy_sections import PolicyChoice
from gateway.config.problems import Path
from gateway.config.rule_findings import RuleFinding, get_member, iter_mappings
from gateway.config.value_types import Duration, Section, setting
from gateway.config.yaml_source import number_if_substituted

AUTO = "auto"
"""Value of a pool's `policy` that turns automatic selection on.

It is short for the default policy together with a section `auto` without settings."""

DEFAULT_PORTFOLIO = ("priced", "prefix_aware", "llmd_blend", "lmetric")
LEAST_INTERVAL_S = 2.0


class AutoPolicy(Section):
    """Settings of automatic policy selection: which policies are compared, and when."""

    mode: Literal["switch", "advise"] = setting(
        "switch",
        "What to do when another policy would serve more requests within their latency budgets: "
        "switch to it, or only log the advice.",
    )
    portfolio: Annotated[tuple[PolicyChoice, ...], Field(min_length=1, max_length=8)] = setting(
        DEFAULT_PORTFOLIO, "Names of the routing policies to compare with the current one."
    )
    interval: Annotated[Duration, Field(ge=LEAST_INTERVAL_S)] = setting(
        "5m", "Time from one comparison to the next; at least 2s."
    )
    window: Annotated[Duration, Field(ge=LEAST_INTERVAL_S)] = setting(
        "10m", "Length of the newest part of the access log that a comparison replays; at least 2s."
    )
    cpu_percent: Annotated[float, Field(gt=0, le=50), BeforeValidator(number_if_substituted)] = (
        setting(5, "Maximum CPU use of the replay process, in percent of one core; at most 50.")
    )
    pinned: Annotated[bool, Field(strict=True)] = setting(
        False, "Whether the pool keeps its current policy whatever the comparisons show."
    )


def without_auto_name(data: Any) -> Any:
    """Return a pool's configuration with `policy: auto` replaced by an empty section `auto`.

    `data` is the pool's configuration as plain data. A configuration with another policy is
    returned unchanged.
    """
    if get_member(data, "policy") != AUTO:
        return data
    rest = {key: value for key, value in data.items() if key != "policy"}
    return {AUTO: {}, **rest}


def auto_errors(data: Any) -> Iterator[RuleFinding]:
    """Yield an error for each setting that makes automatic policy selection impossible.

    An example is an access log that is not a file, so that it cannot be replayed.
    """
    logs = get_member(data, "observability")
    target, blocks = get_member(logs, "access_log"), get_member(logs, "access_blocks")
    for path, pool in iter_mappings(get_member(data, "pools"), ("pools",)):
        auto_key = auto_path(pool, path)
        if auto_key is None:
            continue
        if target in (None, "stdout", "off"):
            text = "auto replays the access log, so observability.access_log must name a file"
            yield RuleFinding(auto_key, text)
        if blocks is False:
            text = f"pool {path[-1]} with auto needs the ids of prompt blocks in the access log"
            yield RuleFinding(("observability", "access_blocks"), text)
        if get_member(data, "shared") is not None:
            text = (
                "auto works with one gateway and its workers, not with several gateways that "
                "share state (section `shared`)"
            )
            yield RuleFinding(auto_key, text)


def auto_path(pool: Any, path: Path) -> Path | None:
    """Return the path of the setting that turns on automatic policy selection for a pool.

    `path` is the configuration path of the pool. Returns None if the pool's policy is fixed.
    """
    if get_member(pool, "policy") == AUTO:
        return (*path, "policy")
    return (*path, AUTO) if get_member(pool, AUTO) is not None else None

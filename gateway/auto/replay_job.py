"""Builds the input for a comparison of policies: the job with the pools' settings and the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.auto.pool_state import PoolState, member_of
from gateway.config import AutoPolicy, Config, Pool
from policies.auto.replay_messages import PoolJob, ReplayJob

ENDPOINT_FIELDS = ("role", "layout", "labels", "max_concurrency", "kv_tokens")


def build_job(
    config: Config,
    states: Mapping[str, PoolState],
    rows: Sequence[Mapping[str, Any]],
    now_s: float,
) -> ReplayJob:
    """Return the job for a replay process, which compares the routing policies of the given pools.

    config  the current configuration
    states  the state of each pool whose policies are compared
    rows    the endpoints as the admin page /endpoints shows them; they supply discovered endpoints
            and KV sizes
    now_s   current Unix time in seconds
    """
    tree = config.model_dump(mode="json", by_alias=True, include={"pools", "slo", "models"})
    tree["tenants"] = [{"name": tenant.name, "weight": tenant.weight} for tenant in config.tenants]
    for name, pool in config.pools.items():
        if pool.discover is not None:
            tree["pools"][name]["endpoints"] = [
                {field: row[field] for field in ENDPOINT_FIELDS}
                for row in rows
                if row["pool"] == name
            ]
        else:
            _add_kv_sizes(tree["pools"][name]["endpoints"], pool, rows)
    tree["pools"] = {name: pool for name, pool in tree["pools"].items() if name in states}
    return ReplayJob(
        tree,
        config.observability.access_log,
        now_s,
        min(_section(config, name).cpu_percent for name in states) / 100,
        tuple(_pool_job(config, name, state, rows) for name, state in states.items()),
    )


def _add_kv_sizes(
    endpoints: Sequence[dict[str, Any]], pool: Pool, rows: Sequence[Mapping[str, Any]]
) -> None:
    # Add the KV capacities that engines report, where the configuration states none.
    reported = {row["name"]: row.get("kv_tokens") for row in rows}
    for values, spec in zip(endpoints, pool.endpoints, strict=True):
        if values.get("kv_tokens") is None:
            values["kv_tokens"] = reported.get(spec.display_name)


def _pool_job(
    config: Config, name: str, state: PoolState, rows: Sequence[Mapping[str, Any]]
) -> PoolJob:
    pool = config.pools[name]
    endpoints = (
        [spec.display_name for spec in pool.endpoints]
        if pool.discover is None
        else [row["name"] for row in rows if row["pool"] == name]
    )
    auto = _section(config, name)
    others = (member_of(spec) for spec in auto.portfolio)
    members = {member.label: member for member in (state.policy, *others)}
    return PoolJob(
        name,
        tuple(endpoints),
        tuple(members.values()),
        auto.window,
        max(state.counts_from_s, state.decider.counted_until_s),
        state.in_force_since_s,
    )


def _section(config: Config, pool: str) -> AutoPolicy:
    auto = config.pools[pool].auto
    assert auto is not None
    return auto

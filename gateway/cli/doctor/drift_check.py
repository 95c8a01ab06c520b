"""Checks for `penstock doctor` whether a running gateway reports workload drift.

Workload drift means that requests no longer resemble the workload in a pool's `sized_for`.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.cli.doctor.findings import CheckFinding, pass_finding, unknown_finding, warn_finding
from gateway.config import Config

CHECK = "requests as sized for"
TIMEOUT_S = 3.0


def check_drift(config: Config) -> Iterator[CheckFinding]:
    """Yield a finding for each pool with a `sized_for`, as the admin server reports its state."""
    if not config.sized_for:
        return
    try:
        rows = {row["pool"]: row for row in _fetch(config)}
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        rows = {}
    for pool in config.sized_for:
        row = rows.get(pool)
        if row is None:
            yield unknown_finding(
                f"pool {pool}",
                CHECK,
                "no running gateway with this configuration answers at listeners.admin",
                "penstock drift LOG --config FILE compares a log",
            )
        else:
            yield _finding(pool, row)


def _finding(pool: str, row: Mapping[str, Any]) -> CheckFinding:
    subject = f"pool {pool}"
    if row["drift"]:
        seen = f"{', '.join(row['measures'])} differ since {row['since']}"
        return warn_finding(subject, CHECK, seen, "penstock drift LOG --config FILE")
    if row["window"] is None:
        seen = "no window of 100 requests has ended yet"
        return unknown_finding(subject, CHECK, seen, "run the check again in ten minutes")
    return pass_finding(subject, CHECK, f"no drift in the window until {row['window']['ends']}")


def _fetch(config: Config) -> list[dict[str, Any]]:
    listener = config.listeners.admin
    if listener.tls is not None:
        return []
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listener.host, listener.host)
    connection = http.client.HTTPConnection(host, listener.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/drift")
        response = connection.getresponse()
        return list(json.loads(response.read(1 << 20))["pools"]) if response.status == 200 else []
    finally:
        connection.close()

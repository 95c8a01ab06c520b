"""What a comparison of routing policies requires: healthy endpoints, and no other trial.

While a pool does not meet these conditions, its policies are neither compared nor changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gateway.config import Pool

HEALTHY = "up"


def find_failure(pool: str, rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the problem of the first impaired endpoint of a pool; "" if all endpoints are healthy.

    `rows` has the endpoints as the admin page /endpoints shows them.
    """
    own = [row for row in rows if row["pool"] == pool]
    if not own:
        return "the pool has no endpoint"
    for row in own:
        if row["state"] != HEALTHY or not row["available"]:
            return f"endpoint {row['name']} is {row['state']}"
        if row.get("slow") is not None:
            return f"endpoint {row['name']} is slow"
    return ""


def find_trial(spec: Pool) -> str:
    """Return a text that names the pool's trial, such as "the pool has a canary"; "" without one.

    During a trial, the pool's policies are not compared.
    """
    if spec.canary is not None:
        return "the pool has a canary"
    return "the pool has shadow policies" if spec.shadow else ""

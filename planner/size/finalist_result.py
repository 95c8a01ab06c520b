"""The result of replaying recorded traffic on one candidate fleet.

The type is in its own module, because the modules that replay are slow to import.
"""

from __future__ import annotations

import msgspec


class Finalist(msgspec.Struct, frozen=True):
    """The result of replaying recorded traffic on one candidate fleet.

    fleet       description of the fleet
    gpus        number of its GPUs
    usd_hour    their cost in dollars per hour
    attainment  share of requests served within the promised latencies, 0 to 1
    refused     share of requests that the gateway refused with status 429
    ttft_p95_s  95th percentile of the time to first token in seconds; None: none was served
    tpot_p95_s  95th percentile of the time per further token in seconds; None: none was served
    hit_ratio   share of prompt tokens that were cached
    """

    fleet: str
    gpus: int
    usd_hour: float
    attainment: float
    refused: float
    ttft_p95_s: float | None
    tpot_p95_s: float | None
    hit_ratio: float

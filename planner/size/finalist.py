"""The type of the result of one replayed fleet.

It is in its own module because the replay is slow to import.
"""

from __future__ import annotations

import msgspec


class Finalist(msgspec.Struct, frozen=True):
    """The result of replaying recorded traffic on one candidate fleet.

    attainment  share of requests served within the promised latencies
    refused     share of requests that the gateway refused with 429
    """

    fleet: str
    gpus: int
    usd_hour: float
    attainment: float
    refused: float
    ttft_p95_s: float | None
    tpot_p95_s: float | None
    hit_ratio: float

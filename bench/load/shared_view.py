"""Measures how well two gateways share knowledge of cached prompts by Redis, also during an outage.

    python -m bench.load.shared_view [--requests 1500] [--speed 3] [--outage 600]

A recorded trace of conversations is sent through one gateway, through two that share their state,
and through two that do not. With shared state, 97% of the cache hit ratio of one gateway is
required.

With --outage, Redis is then stopped under load for that many seconds. During this time there must
be no errors and no unlimited growth of memory. Both gateways must be in sync within 5 s after Redis
has returned.

A higher speed makes the engines faster, but not the messages between gateways. This does not change
the result, unless the machine is overloaded. With few requests the hit ratio means nothing.

Exit status: 1 if a requirement is missed. One part takes requests / 2.9 / speed seconds, so it is
not part of `make test`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tests.e2e import processes
from tests.e2e.processes import GatewayProcess, mock_fleet
from tests.e2e.shared_fleet import metric, replay_conversation, shared_gateway, wait_until
from tests.redis_server import redis_server

MODEL = ("--model", "llama-3.1-70b-fp8", "--gpu", "h200", "--tp", "4")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench.load.shared_view",
        description="Compare two gateways that share their state through Redis with one gateway.",
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=1500,
        help="number of requests of the trace to send (default: %(default)s)",
    )
    parser.add_argument(
        "--speed",
        type=float,
        default=3.0,
        help="factor by which engines and clients are faster than real time (default: %(default)s)",
    )
    parser.add_argument(
        "--outage",
        type=float,
        default=0.0,
        help=(
            "number of seconds for which Redis is stopped during the run; 0: no outage "
            "(default: %(default)s)"
        ),
    )
    options = parser.parse_args()
    processes.AT_MOST_S = 4 * (options.outage + options.requests / options.speed)
    one = _measure_hits("one gateway", 1, False, options.requests, options.speed)
    two = _measure_hits("two, shared state", 2, True, options.requests, options.speed)
    _measure_hits("two, separate", 2, False, options.requests, options.speed)
    print(f"two with shared state reach {two / one:.3f} of one gateway's hits (goal >= 0.97)")
    is_met = two >= 0.97 * one
    if options.outage:
        is_met = _measure_outage(options.outage, options.speed) and is_met
    return 0 if is_met else 1


def _start_gateways(
    stack: ExitStack, count: int, redis_url: str | None, speed: float
) -> list[GatewayProcess]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    engines = [
        url
        for _ in range(2)
        for url in stack.enter_context(mock_fleet(*MODEL, "--speed", str(speed)))
    ]
    return [
        stack.enter_context(shared_gateway(folder, f"g{number}", engines, redis_url))
        for number in range(count)
    ]


def _measure_hits(name: str, count: int, is_shared: bool, requests: int, speed: float) -> float:
    with ExitStack() as stack:
        gateways = _start_gateways(
            stack, count, stack.enter_context(redis_server()).url if is_shared else None, speed
        )
        report = asyncio.run(
            replay_conversation([gateway.url for gateway in gateways], requests, speed)
        )
        blind = sum(metric(gateway, "penstock_blind_picks_total") for gateway in gateways)
    ratio = report.cached_ratio or 0.0
    print(
        f"{name:18} hit ratio {ratio:.4f}, errors {report.errors}, "
        f"picks before the state was loaded {blind:.0f}",
        flush=True,
    )
    return ratio


def _measure_outage(seconds: float, speed: float) -> bool:
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server())
        gateways = _start_gateways(stack, 2, redis.url, speed)
        urls = [gateway.url for gateway in gateways]
        asyncio.run(replay_conversation(urls, 100, speed))
        before = [gateway.resident_bytes for gateway in gateways]
        redis.stop()
        ends, errors, requests = time.monotonic() + seconds, 0, 0
        while time.monotonic() < ends:
            report = asyncio.run(replay_conversation(urls, 300, speed, first=100))
            errors += sum(report.errors.values())
            requests += len(report.records)
        growth = [
            gateway.resident_bytes - size for gateway, size in zip(gateways, before, strict=True)
        ]
        redis.start()
        back_s = wait_until(
            lambda: all(
                metric(gateway, "penstock_shared_staleness_seconds") == 0.0 for gateway in gateways
            ),
            30.0,
        )
    growth_text = ", ".join(f"{bytes_ / 2**20:.1f} MiB" for bytes_ in growth)
    print(
        f"{seconds:.0f} s without Redis: {requests} requests, {errors} errors, "
        f"memory grew by {growth_text}; in sync after {back_s:.1f} s"
    )
    return not errors and back_s <= 5.0 and max(growth) < 128 << 20


if __name__ == "__main__":
    sys.exit(main())

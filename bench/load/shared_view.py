"""Two gateways and a Redis on the recorded conversation: what sharing a view is worth, and what losing it costs.

    python -m bench.load.shared_view [--requests 1500] [--speed 3] [--outage 600]

Hit ratio of one gateway, of two that share a view (at least 0.97 of it) and of two that do not. With --outage, Redis is
then away for so many seconds under load: no error, memory bounded, and both agree within 5 s of its return.
At a higher speed engines are faster and news is not, which is no matter up to seconds (tests/sim holds that on the
virtual clock); but processes that want for a core serve late, and then the load decides and no cache. Few requests find
little, and tell nothing. Exit status: 1 when a line does not hold. Not in `make test`: a part takes requests / 2.9 /
speed seconds.
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
    parser = argparse.ArgumentParser(prog="bench.load.shared_view", description="Two gateways with one view.")
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--speed", type=float, default=3.0, help="of the engines and the clients")
    parser.add_argument("--outage", type=float, default=0.0, help="seconds without Redis; 0 leaves that out")
    asked = parser.parse_args()
    processes.AT_MOST_S = 4 * (asked.outage + asked.requests / asked.speed)
    one = _hits("one gateway", 1, False, asked.requests, asked.speed)
    both = _hits("two with one view", 2, True, asked.requests, asked.speed)
    _hits("two on their own", 2, False, asked.requests, asked.speed)
    print(f"two with one view find {both / one:.3f} of what one finds (goal >= 0.97)")
    held = both >= 0.97 * one
    if asked.outage:
        held = _outage(asked.outage, asked.speed) and held
    return 0 if held else 1


def _house(stack: ExitStack, count: int, redis_url: str | None, speed: float) -> list[GatewayProcess]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    engines = [url for _ in range(2) for url in stack.enter_context(mock_fleet(*MODEL, "--speed", str(speed)))]
    return [stack.enter_context(shared_gateway(folder, f"g{at}", engines, redis_url)) for at in range(count)]


def _hits(name: str, count: int, shared: bool, requests: int, speed: float) -> float:
    with ExitStack() as stack:
        gateways = _house(stack, count, stack.enter_context(redis_server()).url if shared else None, speed)
        report = asyncio.run(replay_conversation([each.url for each in gateways], requests, speed))
        blind = sum(metric(each, "penstock_blind_picks_total") for each in gateways)
    found = report.cached_ratio or 0.0
    print(f"{name:18} hit ratio {found:.4f}, errors {report.errors}, blind picks {blind:.0f}", flush=True)
    return found


def _outage(seconds: float, speed: float) -> bool:
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server())
        gateways = _house(stack, 2, redis.url, speed)
        urls = [each.url for each in gateways]
        asyncio.run(replay_conversation(urls, 100, speed))
        before = [each.resident_bytes for each in gateways]
        redis.stop()
        ends, errors, asked = time.monotonic() + seconds, 0, 0
        while time.monotonic() < ends:
            report = asyncio.run(replay_conversation(urls, 300, speed, first=100))
            errors += sum(report.errors.values())
            asked += len(report.records)
        grown = [each.resident_bytes - was for each, was in zip(gateways, before, strict=True)]
        redis.start()
        back_s = wait_until(lambda: all(metric(each, "penstock_shared_staleness_seconds") == 0.0 for each in gateways), 30.0)
    shown = ", ".join(f"{bytes_ / 2**20:.1f} MiB" for bytes_ in grown)
    print(f"{seconds:.0f} s without Redis: {asked} requests, {errors} errors, grown by {shown}; back in {back_s:.1f} s")
    return not errors and back_s <= 5.0 and max(grown) < 128 << 20


if __name__ == "__main__":
    sys.exit(main())

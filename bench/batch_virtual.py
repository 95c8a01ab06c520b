"""Measures on virtual time how much a batch job of background requests slows live requests.

    python -m bench.batch_virtual --lines 2000 --seeds 1 2

This is the measurement of bench/batch.py without kills of the gateway. The gateway, the mock
engines and the clients run in one process. Its clock jumps to the next timer whenever there is
nothing to do, so the results do not depend on how busy the machine is.

The times include no computing time. Live requests call the gateway directly, without a socket; the
gateway uses sockets to the engines.
"""

from __future__ import annotations

import time

from bench.virtual_loop import VirtualLoop

CLOCK = VirtualLoop()
time.monotonic, time.time = CLOCK.time, CLOCK.wall_time  # before other modules import them

import argparse  # noqa: E402
import asyncio  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import aiohttp  # noqa: E402
import msgspec  # noqa: E402

from bench import batch as bench  # noqa: E402
from bench import batch_tokens  # noqa: E402
from bench.logged_engines import logged_spec  # noqa: E402
from gateway.app import App  # noqa: E402
from gateway.batch.answer_receiver import LineClient  # noqa: E402
from gateway.config.loader import load_config  # noqa: E402
from gateway.protocol.api_table import CHAT  # noqa: E402
from gateway.protocol.response.date_header import ResponseClock  # noqa: E402
from mockgpu.fleet import run_fleet  # noqa: E402


class LiveClient(LineClient):
    """Stands in for a live client's connection, and records when the answer's tokens arrive."""

    def __init__(self, number: int) -> None:
        request = bench.body(f"Live question {number}?", bench.LIVE_TOKENS) | {"stream": True}
        super().__init__(msgspec.json.encode(request), {}, ResponseClock(), None)
        self.first = self.last = 0.0
        self.tokens, self.is_whole = 0, False

    def write(self, data: bytes) -> None:
        tokens = data.count(b'"content":"') - data.count(b'"content":""')
        if tokens:
            self.last = CLOCK.time()
            self.first, self.tokens = self.first or self.last, self.tokens + tokens
        self.is_whole = self.is_whole or b"[DONE]" in data


async def ask(app: App, number: int) -> bench.Answer:
    sent, client = CLOCK.time(), LiveClient(number)
    _, serving = app._request_factory.serve_for("", client, CHAT)
    await serving
    tpot_s = (client.last - client.first) / max(1, client.tokens - 1)
    return bench.Answer(client.is_whole, client.first - sent, tpot_s, client.tokens)


async def live_traffic(
    app: App, times: list[float], ending: asyncio.Task[Any] | None
) -> list[bench.Answer]:
    """Send live requests to the gateway at the given times, and return their answers.

    app     the gateway
    times   when requests are sent, in seconds from the start
    ending  the task at whose end no more requests are sent
    """
    began, tasks = CLOCK.time(), []
    for number, at in enumerate(times):
        if ending is not None and ending.done():
            break
        await asyncio.sleep(max(0.0, began + at - CLOCK.time()))
        tasks.append(asyncio.create_task(ask(app, number)))
    return await asyncio.gather(*tasks)


async def measure(
    options: argparse.Namespace, times: list[float], window_s: float | None
) -> bench.Outcome:
    """Send the live requests to new engines on virtual time, and return the measurements."""
    with tempfile.TemporaryDirectory() as work:
        spec = logged_spec(options.speed, str(Path(work) / batch_tokens.GENERATION_LOG))
        async with run_fleet([spec] * bench.GROUPS) as members:
            urls = [member.url for member in members]
            config = Path(work) / "gateway.yaml"
            config.write_text(bench.config_text(options, urls, 0, 0, work))
            app = App(load_config(config, {}))
            await app.start()
            async with aiohttp.ClientSession() as http:
                try:
                    return await _measure(options, http, app, urls, times, window_s, Path(work))
                finally:
                    await app.stop()


async def _measure(
    options: argparse.Namespace,
    http: aiohttp.ClientSession,
    app: App,
    urls: list[str],
    times: list[float],
    window_s: float | None,
    work: Path,
) -> bench.Outcome:
    began, ending, journal = CLOCK.time(), None, batch_tokens.JournalWatch(work / "store")
    if window_s is not None:
        batch_id = await bench.create_batch(http, app.url, options, window_s)
        ending = asyncio.create_task(bench.wait_for_batch(http, app.url, batch_id, journal))
    answers = await live_traffic(app, times, ending)
    batch, output = (None, "") if ending is None else await ending
    batch_s = CLOCK.time() - began
    made = await batch_tokens.generated_tokens(http, urls)
    stops = app.metrics.batch_preemptions_total
    stopped = {name: stops.labels(name).value for name in ("kept", "restarted", "waiting")}
    kept, told = (
        app.metrics.batch_kept_tokens_total.value,
        (journal.kept(), batch_tokens.read_log(work)),
    )
    return bench.Outcome(answers, made, stopped, kept, batch, batch_s, output, *told, [], 0.0)


async def service_time_s(options: argparse.Namespace) -> float:
    """Measure the seconds that one live request takes while all slots of the engines are in use."""
    count = bench.GROUPS * options.places
    answers = await measure(options, [0.0] * count, None)
    return sum(a.ttft_s + a.tpot_s * (a.tokens - 1) for a in answers.answers) / count


def main() -> None:
    options = bench.parse_options(__doc__)
    asyncio.set_event_loop(CLOCK)
    bench.run(
        options,
        CLOCK.run_until_complete(service_time_s(options)),
        lambda times, _, window_s: CLOCK.run_until_complete(measure(options, times, window_s)),
    )


if __name__ == "__main__":
    main()

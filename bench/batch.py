"""Measures how much a batch job of background requests slows live requests.

    make batch
    python bench/batch.py --lines 2000 --places 32 --seeds 1 2

The same live requests are sent twice to fresh mock engines: beside a batch job, and alone for the
same time. They use 90% of the engines' capacity and come partly in bursts. The deadline of the
batch job is twice the time that it needs on the remaining capacity.

The gateway is killed (SIGKILL) and restarted at the same moments of both runs. Live requests that a
kill breaks are left out of both results.

For each seed, it prints:

- the shares of live requests that met their latency targets
- how often requests of the batch job were stopped to make room for live requests
- how many tokens the engines generated more than once
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.batch_tokens import (
    GENERATION_LOG,
    Attempts,
    JournalWatch,
    Regenerated,
    count_regenerated,
    generated_tokens,
    long_stops,
    read_log,
)
from mockgpu.mock_tokenizer import expected_text, render_chat
from tests.metrics_page import total
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
MODEL = "demo-8b"
GROUPS = 2
LIVE_TOKENS = 40
LONG_TOKENS = 20  # a stopped answer counts as long from this number of kept tokens on
LAG_EVERY_S = 0.01
BURST_EVERY_S, BURST_SIZE = 6.0, 1.0  # requests of a burst, as a multiple of all places
ENV = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
CONFIG = """
version: 1
listeners: {{api: {{port: {port}}}, admin: {{port: {admin}}}}}
observability: {{access_log: 'off'}}
models: [{{name: demo-8b, pool: main, resume: {{}}}}]
pools:
  main:
    policy: least_loaded
    endpoints: [{endpoints}]
    waiting_room: {{size: 1024, timeout: 60s}}
slo: {{classes: {{standard: {{ttft: {ttft}s, tpot: {tpot}ms}},
  batch: {{ttft: 600s, tpot: 10s, weight: 0.1}}}}}}
batch: {{dir: '{folder}/store', share: 1}}
health: {{timeout: 10s, progress: 60s}}
"""
PREEMPTIONS = "penstock_batch_preemptions_total"


class Answer(NamedTuple):
    """One live request's answer: whether it is complete, and how fast its tokens arrived.

    is_whole  whether the answer is complete
    ttft_s    time to the first token, in seconds
    tpot_s    time per further token, in seconds
    tokens    number of tokens in the answer
    """

    is_whole: bool
    ttft_s: float
    tpot_s: float
    tokens: int


class Outcome(NamedTuple):
    """What one run of live requests measured, with or without a batch job beside them.

    kept   for each request of the batch job, the number of tokens kept at each of its stops
    log    the engines' generation log
    kills  monotonic times at which the gateway was killed, in seconds
    lag_s  99th percentile of the delay of this process's timers in seconds; it is high if the
           machine had no CPU time to spare
    """

    answers: list[Answer]
    engine_tokens: float
    stopped: dict[str, float]
    kept_tokens: float
    batch: dict[str, Any] | None
    batch_s: float
    output: str
    kept: dict[int, list[int]]
    log: list[bytes]
    kills: list[float]
    lag_s: float


class Gateway:
    """A gateway process on fixed ports, which the benchmark can kill and restart."""

    def __init__(self, config: Path, port: int, admin: int) -> None:
        self._config = config
        self.url, self.admin_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin}"
        self._process: subprocess.Popen[bytes] | None = None
        self.totals: dict[str, float] = {}
        self.killed_at: list[float] = []

    async def start(self, http: aiohttp.ClientSession) -> None:
        command = [sys.executable, "-m", "gateway", "serve", "--config", str(self._config)]
        self._process = subprocess.Popen(command, env=ENV, stderr=subprocess.DEVNULL)
        while True:
            try:
                async with http.get(f"{self.url}/v1/models") as answer:
                    if (await answer.json())["data"]:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)

    async def count(self, http: aiohttp.ClientSession) -> None:
        async with http.get(f"{self.admin_url}/metrics") as answer:
            page = await answer.text()
        for result in ("kept", "restarted", "waiting"):
            self._add(result, total(page, PREEMPTIONS, result=result))
        self._add("kept_tokens", total(page, "penstock_batch_kept_tokens_total"))

    def _add(self, name: str, value: float) -> None:
        self.totals[name] = self.totals.get(name, 0.0) + value

    def kill(self) -> None:
        if self._process is not None:
            self.killed_at.append(time.monotonic())
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()


@contextmanager
def mock_groups(speed: float, log: Path) -> Iterator[list[str]]:
    """Run mock engines in one process, `speed` times as fast as real time, and yield their URLs.

    log  file to which they write each sequence of tokens that they generate
    """
    command = [sys.executable, "-m", "bench.logged_engines", str(GROUPS), str(speed), str(log)]
    with subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield [process.stdout.readline().strip() for _ in range(GROUPS)]
        finally:
            process.terminate()


def body(text: str, tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
    }


async def ask(http: aiohttp.ClientSession, url: str, number: int) -> Answer:
    sent, first, last, tokens, is_whole = time.monotonic(), 0.0, 0.0, 0, False
    request = body(f"Live question {number}?", LIVE_TOKENS) | {"stream": True}
    try:
        async with http.post(f"{url}/v1/chat/completions", json=request) as answer:
            if answer.status == 200:
                async for line in answer.content:
                    if b'"content":"' in line and b'"content":""' not in line:
                        last = time.monotonic()
                        first, tokens = first or last, tokens + 1
                    is_whole = is_whole or b"[DONE]" in line
            else:
                is_whole = False
    except (aiohttp.ClientError, ConnectionError):
        is_whole = False
    tpot_s = (last - first) / max(1, tokens - 1)
    return Answer(is_whole, first - sent, tpot_s, tokens)


def arrivals(rate: float, places: int, seconds: float, seed: int) -> list[float]:
    """Return the times at which live requests are sent, in seconds from the start.

    The times are random. Some requests come in bursts that fill all slots of the engines.
    """
    rng = random.Random(seed)
    burst = int(places * BURST_SIZE)
    times, now = [], 0.0
    steady = max(0.1 * rate, rate - burst / BURST_EVERY_S)
    while (now := now + rng.expovariate(steady)) < seconds:
        times.append(now)
    at = BURST_EVERY_S / 2
    while at < seconds:
        times += [at] * burst
        at += BURST_EVERY_S
    return sorted(times)


async def live_traffic(
    http: aiohttp.ClientSession,
    gateway: Gateway,
    times: list[float],
    kills: list[float],
    ending: asyncio.Task[Any] | None,
) -> list[Answer]:
    """Send live requests at `times` until the task `ending` is done, and return their answers.

    The gateway is killed at the times `kills`. All times are in seconds from the start.
    """
    began, tasks, waiting = time.monotonic(), [], sorted(kills)
    restart: asyncio.Task[None] | None = None
    for number, at in enumerate(times):
        if ending is not None and ending.done():
            break
        await asyncio.sleep(max(0.0, began + at - time.monotonic()))
        if waiting and at >= waiting[0]:
            waiting.pop(0)
            await gateway.count(http)
            gateway.kill()
            restart = asyncio.create_task(gateway.start(http))
        tasks.append(asyncio.create_task(ask(http, gateway.url, number)))
    if restart is not None:
        await restart
    return await asyncio.gather(*tasks)


async def watch_lag(lags_s: list[float]) -> None:
    while True:
        due = time.monotonic() + LAG_EVERY_S
        await asyncio.sleep(LAG_EVERY_S)
        lags_s.append(time.monotonic() - due)


async def create_batch(
    http: aiohttp.ClientSession, url: str, options: argparse.Namespace, window_s: float
) -> str:
    rows = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": body(f"Batch question {number}?", options.tokens),
        }
        for number in range(options.lines)
    ]
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", "\n".join(map(json.dumps, rows)).encode(), filename="input.jsonl")
    async with http.post(f"{url}/v1/files", data=form) as answer:
        file_id = (await answer.json())["id"]
    request = {
        "input_file_id": file_id,
        "endpoint": "/v1/chat/completions",
        "completion_window": f"{window_s:.0f}s",
    }
    async with http.post(f"{url}/v1/batches", json=request) as answer:
        return str((await answer.json())["id"])


async def wait_for_batch(
    http: aiohttp.ClientSession, url: str, batch_id: str, journal: JournalWatch
) -> tuple[dict[str, Any], str]:
    while True:
        journal.open_if_created()
        try:
            async with http.get(f"{url}/v1/batches/{batch_id}") as answer:
                batch: dict[str, Any] = await answer.json()
            if batch["status"] in ("completed", "failed", "expired", "cancelled"):
                break
        except (aiohttp.ClientError, ConnectionError):
            pass  # the gateway is being restarted
        await asyncio.sleep(0.25)
    if batch["output_file_id"] is None:
        return batch, ""
    async with http.get(f"{url}/v1/files/{batch['output_file_id']}/content") as answer:
        return batch, await answer.text()


async def measure(
    options: argparse.Namespace, times: list[float], kills: list[float], window_s: float | None
) -> Outcome:
    """Send the live requests to fresh engines, and return the measurements.

    options   the options of the program
    times     when live requests are sent, in seconds
    kills     when the gateway is killed, in seconds
    window_s  deadline of a batch job that runs at the same time, in seconds; the run ends with that
              job. None: there is no batch job
    """
    with ExitStack() as stack:
        work = stack.enter_context(tempfile.TemporaryDirectory())
        log, config = Path(work) / GENERATION_LOG, Path(work) / "gateway.yaml"
        urls = stack.enter_context(mock_groups(options.speed, log))
        port, admin = free_port(), free_port()
        config.write_text(config_text(options, urls, port, admin, work))
        gateway = Gateway(config, port, admin)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:
            await gateway.start(http)
            try:
                return await _measure(
                    options, http, gateway, urls, times, kills, window_s, Path(work)
                )
            finally:
                gateway.kill()


async def _measure(
    options: argparse.Namespace,
    http: aiohttp.ClientSession,
    gateway: Gateway,
    urls: list[str],
    times: list[float],
    kills: list[float],
    window_s: float | None,
    work: Path,
) -> Outcome:
    began, ending, lags_s = time.monotonic(), None, [0.0]
    journal = JournalWatch(work / "store")
    watches = [asyncio.create_task(watch_lag(lags_s))]
    if window_s is not None:
        batch_id = await create_batch(http, gateway.url, options, window_s)
        ending = asyncio.create_task(wait_for_batch(http, gateway.url, batch_id, journal))
    answers = await live_traffic(http, gateway, times, kills, ending)
    batch, output = (None, "") if ending is None else await ending
    batch_s = time.monotonic() - began
    for watch in watches:
        watch.cancel()
    await gateway.count(http)
    made = await generated_tokens(http, urls)
    totals, lag_s = dict(gateway.totals), sorted(lags_s)[len(lags_s) * 99 // 100]
    kept_tokens, log = totals.pop("kept_tokens"), read_log(work)
    told = (journal.kept(), log, gateway.killed_at)
    return Outcome(answers, made, totals, kept_tokens, batch, batch_s, output, *told, lag_s)


def config_text(
    options: argparse.Namespace, urls: list[str], port: int, admin: int, work: str
) -> str:
    endpoints = ", ".join(f"{{url: '{url}', max_concurrency: {options.places}}}" for url in urls)
    return CONFIG.format(
        port=port,
        admin=admin,
        endpoints=endpoints,
        folder=work,
        ttft=options.ttft,
        tpot=options.tpot * 1000,
    )


async def service_time_s(options: argparse.Namespace) -> float:
    """Measure how many seconds one live request takes while all slots of the engines are in use."""
    with tempfile.TemporaryDirectory() as work, ExitStack() as stack:
        urls = stack.enter_context(mock_groups(options.speed, Path(work) / GENERATION_LOG))
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:
            began = time.monotonic()
            for wave in range(3):
                await asyncio.gather(
                    *(
                        ask(http, url, wave * 1000 + number)
                        for url in urls
                        for number in range(options.places)
                    )
                )
            return (time.monotonic() - began) / 3


def attainment(options: argparse.Namespace, outcome: Outcome) -> float:
    """Return the share of complete answers that met both latency targets.

    The targets limit the time to the first token (TTFT) and the time per further token (TPOT).
    """
    whole = [answer for answer in outcome.answers if answer.is_whole]
    good = sum(a.ttft_s <= options.ttft and a.tpot_s <= options.tpot for a in whole)
    return good / len(whole)


def compare(options: argparse.Namespace, alone: Outcome, beside: Outcome) -> dict[str, Any]:
    """Compare live requests beside a batch job with the same requests alone.

    options  the options of the program
    alone    what was measured without the batch job
    beside   what was measured with it

    Returns the figures of this comparison by name, such as the shares of requests in time.
    """
    found: dict[str, int] = {}
    final: dict[int, int] = {}
    equal = 0
    for line in map(json.loads, beside.output.splitlines()):
        found[line["custom_id"]] = found.get(line["custom_id"], 0) + 1
        number = line["custom_id"].removeprefix("line-")
        answer = line["response"]["body"]
        request = body(f"Batch question {number}?", options.tokens)
        expected = expected_text(request, options.tokens)
        equal += answer["choices"][0]["message"]["content"] == expected
        final[int(number)] = answer["usage"]["completion_tokens"]
    assert beside.batch is not None
    live_tokens = sum(answer.tokens for answer in beside.answers)
    attempts, again = regenerated(options, beside, final)
    return {
        "live_alone": attainment(options, alone),
        "live_beside": attainment(options, beside),
        "stopped": beside.stopped,
        "long_stops": long_stops(beside.kept, LONG_TOKENS),
        "kept_tokens": beside.kept_tokens,
        "status": beside.batch["status"],
        "batch_s": beside.batch_s,
        "results": len(found),
        "twice": sum(count > 1 for count in found.values()),
        "equal": equal,
        "engine_tokens": beside.engine_tokens,
        "extra_tokens": beside.engine_tokens - live_tokens - sum(final.values()),
        "kept_tokens_again": again.kept_again,
        "in_flight_tokens": again.in_flight_tokens,
        "stops_by_tokens_in_flight": dict(sorted(again.in_flight.items())),
        "killed_tokens": again.killed,
        "live_tokens_not_received": attempts.others - live_tokens,
        "unlogged_tokens": beside.engine_tokens - attempts.generated,
    }


def regenerated(
    options: argparse.Namespace, beside: Outcome, final: dict[int, int]
) -> tuple[Attempts, Regenerated]:
    """Return the engines' attempts at the batch job's requests, and the tokens generated in vain.

    options  the options of the program
    beside   what was measured of the run with the batch job
    final    number of tokens of each answer
    """
    prompts = [
        render_chat(body(f"Batch question {number}?", options.tokens))
        for number in range(options.lines)
    ]
    attempts = Attempts(beside.log, prompts)
    return attempts, count_regenerated(attempts.of, beside.kept, final, beside.kills)


def report(options: argparse.Namespace, alone: Outcome, beside: Outcome) -> None:
    for name, outcome in (("alone", alone), ("beside the batch", beside)):
        broken = sum(not answer.is_whole for answer in outcome.answers)
        share = attainment(options, outcome)
        count = len(outcome.answers)
        print(f"live, {name}: {share:.2%} within targets of {count} ({broken} broken by kills)")
        whole = [answer for answer in outcome.answers if answer.is_whole]
        late = sum(answer.ttft_s > options.ttft for answer in whole)
        slow = sum(answer.tpot_s > options.tpot for answer in whole)
        p99_s = sorted(answer.ttft_s for answer in whole)[len(whole) * 99 // 100]
        print(f"    {late} missed the TTFT (p99 {p99_s:.2f} s), {slow} the TPOT")
        print(f"    timers of the client were up to {outcome.lag_s * 1000:.0f} ms late (p99)")
    found = compare(options, alone, beside)
    print(
        f"stopped requests of the batch: {found['stopped']}, kept {found['kept_tokens']:.0f} tokens"
    )
    print(f"    {found['long_stops']} times with {LONG_TOKENS} and more tokens")
    print(f"batch: {found['status']} in {found['batch_s']:.0f} s")
    results = f"{found['results']} of {options.lines}, {found['twice']} twice"
    print(f"results: {results}, {found['equal']} with the right text")
    made = found["engine_tokens"]
    print(f"tokens generated beyond those in answers: {found['extra_tokens']:.0f} of {made:.0f}")
    print(f"    kept tokens of the batch, generated again: {found['kept_tokens_again']}")
    print(f"    never kept, on their way at a stop: {found['in_flight_tokens']}")
    print(f"        stops by such tokens: {found['stops_by_tokens_in_flight']}")
    print(f"    of the batch, not kept yet when a kill came: {found['killed_tokens']}")
    print(f"    live requests, not received: {found['live_tokens_not_received']}")
    print(f"    not in the engines' logs: {found['unlogged_tokens']:.0f}")


def parse_options(text: str | None) -> argparse.Namespace:
    """Parse the command line of this program, or of batch_virtual.py; `text` describes it."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_batch_options(parser)
    _add_traffic_options(parser)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per seed instead of text"
    )
    return parser.parse_args()


def _add_batch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lines", type=int, default=60, help="number of requests in the batch job")
    parser.add_argument(
        "--tokens", type=int, default=120, help="number of tokens in each answer of the batch"
    )
    parser.add_argument(
        "--kills",
        type=int,
        default=2,
        help="number of times that the gateway is killed and started again (default: %(default)s)",
    )


def _add_traffic_options(parser: argparse.ArgumentParser) -> None:
    # Add the options of the mock engines, and of the live requests beside the batch.
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[1],
        help="random seeds of the live requests; each seed is one measurement",
    )
    parser.add_argument(
        "--places",
        type=int,
        default=8,
        help="maximum concurrent requests of each of the two engines (default: %(default)s)",
    )
    parser.add_argument(
        "--speed",
        type=float,
        default=0.5,
        help="factor by which the mock engines are faster than real time (default: %(default)s)",
    )
    parser.add_argument(
        "--load",
        type=float,
        default=0.9,
        help="live load as a fraction of the engines' capacity (default: %(default)s)",
    )
    parser.add_argument(
        "--ttft",
        type=float,
        default=1.0,
        help="target for the time to first token (TTFT) of live requests, in seconds",
    )
    parser.add_argument(
        "--tpot",
        type=float,
        default=0.1,
        help="target for the time per output token (TPOT) of live requests, in seconds",
    )


Measure = Callable[[list[float], list[float], float | None], Outcome]
"""A function that runs the live requests and returns the measurements.

Its arguments are the times of live requests, the times of kills, and the completion window of a
batch in seconds; None: there is no batch.
"""


def run(options: argparse.Namespace, service_s: float, measure: Measure) -> None:
    """Measure live traffic with and without a batch job for each random seed, and print the
    results.

    service_s  duration of a live request while all slots of the engines are in use, in seconds
    """
    places = GROUPS * options.places
    rate = options.load * places / service_s
    # The batch takes this long on the tenth of the places that the live traffic leaves.
    needed_s = options.lines * service_s * options.tokens / LIVE_TOKENS / (0.1 * places)
    window_s = 2 * needed_s
    kills = [needed_s * (number + 1) / (options.kills + 1) for number in range(options.kills)]
    if not options.json:
        print(f"service time {service_s:.2f} s, {rate:.1f} live requests/s")
        print(f"window {window_s:.0f} s", flush=True)
    for seed in options.seeds:
        times = arrivals(rate, places, window_s, seed)
        beside = measure(times, kills, window_s)
        alone = measure(times[: len(beside.answers)], kills, None)
        if options.json:
            print(json.dumps(compare(options, alone, beside)), flush=True)
        else:
            print(f"\nseed {seed}")
            report(options, alone, beside)


def main() -> None:
    options = parse_options(__doc__)
    run(
        options,
        asyncio.run(service_time_s(options)),
        lambda times, kills, window_s: asyncio.run(measure(options, times, kills, window_s)),
    )


if __name__ == "__main__":
    main()

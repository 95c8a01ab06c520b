"""The measurements of `make bench`, which compares gateways under several kinds of traffic.

Each kind of traffic is called a cell and is measured with every gateway. CPU time is read before
and after the measured period. The difference is divided by the number of requests or stream events
in the period.
"""

from __future__ import annotations

import json
import random
import struct
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compared_systems import (
    BIN,
    DEFAULT,
    GATEWAY_CORE,
    LOAD_CORE,
    MODEL,
    OURS,
    SOURCES,
    NotMeasurable,
    Running,
    core_busy_s,
    cpu_s,
    pinned,
    rss_bytes,
)

BYTES_PER_TOKEN = 4


@dataclass(frozen=True)
class Pace:
    """The durations of one measurement: of the load before it, and of its measured window.

    window_ms  duration of the measured period
    warmup_ms  duration of the load before it, which is not measured
    """

    window_ms: int = 2500
    warmup_ms: int = 500


Numbers = dict[str, float]
"""The results of one measurement, by metric.

`others` is the share of the gateway's core (0 to 1) that other processes used in the meantime.
"""

Measure = Callable[[Running, Pace, Path], Numbers]


@dataclass(frozen=True)
class Row:
    """One row of the result table: a measured quantity, and its limits.

    metric  name of the quantity in the results of a measurement, such as "cpu"
    goals   by name of another gateway: the maximum of (our value) / (its value)
    added   whether goals limit the difference of the two values instead of the ratio
    limit   the maximum of our own value; None: no limit
    """

    name: str
    unit: str
    metric: str
    goals: dict[str, float] = field(default_factory=dict)
    added: bool = False
    limit: float | None = None


@dataclass(frozen=True)
class Cell:
    """One kind of traffic, with the measurement for it.

    policies  routing policy by gateway
    measure   function that measures one running gateway
    rows      rows of the result table
    fresh     whether each measurement starts a new process, because a process that has served
              streams does not return all of their memory
    """

    policies: dict[str, str]
    measure: Measure
    rows: tuple[Row, ...]
    fresh: bool = False


ROUTERS = ("sglang-router", "vllm-router", "smg")
ROUND_ROBIN = dict.fromkeys((OURS, SOURCES, *ROUTERS, "nginx"), "round_robin")
DEFAULTS = {
    OURS: DEFAULT,
    SOURCES: DEFAULT,
    **dict.fromkeys(ROUTERS, "cache_aware"),
    "nginx": "round_robin",
}
"""Each system's default policy: `priced` in Penstock, `cache_aware` in the routers."""
PREFIX_AWARE = {**DEFAULTS, OURS: "prefix_aware", SOURCES: "prefix_aware"}
"""The same, but `prefix_aware` in Penstock, which like the routers' rule needs no predictions."""


# ---- bodies ----


def chat_body(content: str, stream: bool) -> bytes:
    """Return the JSON body of a chat request with one user message, as an SDK writes it."""
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 64,
    }
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return json.dumps(body, separators=(",", ":")).encode()


def paced(
    chunks: int, every_us: int, first_us: int, burst: int = 1, join: int = 0, stamp: int = 0
) -> bytes:
    """Return the body of a streaming request whose prompt tells the test engine when to send
    chunks.

    chunks    number of chunks
    every_us  microseconds between two bursts
    first_us  microseconds before the first burst
    burst     number of chunks that are sent at a time
    join      1: all chunks of a burst in one write; 0: one write for each chunk
    stamp     1: each chunk contains the time at which it is written
    """
    note = (
        f"@bench chunks={chunks} every_us={every_us} first_us={first_us} burst={burst} "
        f"join={join} stamp={stamp}@"
    )
    return chat_body(f"{note} Tell me about water wheels. ################", stream=True)


def prompt_tree(tokens: int, rng: random.Random) -> list[bytes]:
    """Return sixteen prompts of `tokens` tokens that share their beginnings.

    There are four different beginnings of half the length. Each has four continuations, up to nine
    tenths of the length. The load generator appends a number to each request, so that no two
    requests are equal.
    """
    size = tokens * BYTES_PER_TOKEN
    trunks = [_text(size // 2, rng) for _ in range(4)]
    branches = [_text(size * 4 // 10, rng) for _ in range(4)]
    tail = _text(size // 10, rng)
    return [
        chat_body(f"{trunk}{branch} ################ {tail}", stream=False)
        for trunk in trunks
        for branch in branches
    ]


def _text(size: int, rng: random.Random) -> str:
    # Build random text in lines of about 80 bytes.
    #
    # Real prompts have line ends too, which JSON escapes.
    words = [
        "".join(rng.choices("abcdefghijklmnoprstuvw", k=rng.randint(2, 9))) for _ in range(997)
    ]
    out: list[str] = []
    while size > 0:
        line = " ".join(rng.choices(words, k=12))[: min(79, size)] + "\n"
        out.append(line)
        size -= len(line)
    return "".join(out)


def write_bodies(path: Path, bodies: list[bytes]) -> Path:
    """Write request bodies to a file for the load generator, and return the file's path.

    In the file, the length of each body precedes it as an unsigned 32-bit integer.
    """
    path.write_bytes(b"".join(struct.pack("<I", len(body)) + body for body in bodies))
    return path


# ---- one measurement ----


def drive(running: Running, pace: Pace, bodies: Path, **options: object) -> dict[str, Any]:
    """Run the load generator once against a gateway, and return its report.

    Raises NotMeasurable if a request was refused, cut off or lost.
    """
    command = [str(BIN / "load"), "--port", str(running.system.port), "--bodies", str(bodies)]
    settings = {"warmup_ms": pace.warmup_ms, "window_ms": pace.window_ms, **options}
    for name, value in settings.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    if running.pids:
        command += ["--cpu-pids", ",".join(map(str, running.pids))]
    started_s, busy_s, ours_s = time.monotonic(), core_busy_s(GATEWAY_CORE), cpu_s(running.pids)
    process = subprocess.run(
        pinned(LOAD_CORE, command), capture_output=True, text=True, check=False, timeout=120
    )
    others_s = core_busy_s(GATEWAY_CORE) - busy_s - (cpu_s(running.pids) - ours_s)
    if process.returncode:
        raise NotMeasurable(
            f"the load generator ended with status {process.returncode}: {process.stderr.strip()}"
        )
    report: dict[str, Any] = json.loads(process.stdout)
    errors = {kind: n for kind, n in report["errors"].items() if n}
    if errors:
        raise NotMeasurable(
            f"the measurement has failed requests: {errors} (the last HTTP status was "
            f"{report['bad_status']})"
        )
    report["others"] = max(others_s, 0.0) / (time.monotonic() - started_s)
    return report


def cpu_per_request(running: Running, pace: Pace, work: Path) -> Numbers:
    """Measure the gateway's CPU time per small request, in microseconds.

    32 connections each send a new request when the previous one has been answered.
    """
    bodies = write_bodies(
        work / "small", [chat_body("How does a water wheel work? ################", stream=False)]
    )
    report = drive(running, pace, bodies, mode="closed", connections=32)
    return {"cpu": report["cpu_s"] / report["requests"] * 1e6, "others": report["others"]}


def streams(count: int, body: bytes, events: int) -> Measure:
    """Return a function that measures the gateway's CPU time per stream event, in microseconds.

    count   number of concurrent streams
    body    body of the requests
    events  number of events in each stream
    """

    def measure(running: Running, pace: Pace, work: Path) -> Numbers:
        path = write_bodies(work / "streams", [body])
        report = drive(
            running,
            pace,
            path,
            mode="closed",
            connections=count,
            ramp_ms=500,
            events_per_stream=events,
        )
        return {"cpu": report["cpu_s"] / report["events"] * 1e6, "others": report["others"]}

    return measure


def long_prompts(tokens: int) -> Measure:
    """Return a function that measures the gateway's CPU time per long prompt, in microseconds.

    The prompts are built by `prompt_tree()` and have `tokens` tokens.
    """

    def measure(running: Running, pace: Pace, work: Path) -> Numbers:
        path = work / f"prompts-{tokens}"
        if not path.exists():
            write_bodies(path, prompt_tree(tokens, random.Random(tokens)))
        report = drive(running, pace, path, mode="closed", connections=16)
        return {"cpu": report["cpu_s"] / report["requests"] * 1e6, "others": report["others"]}

    return measure


SHORT_STREAM = (8, 10_000, 5_000)  # chunks, µs between them, µs to the first
SHORT_EVENTS = 8 + 4  # role, eight tokens, finish, usage, [DONE]


def ttft_ms(rate: float) -> Measure:
    """Return a function that measures the time to first token of short streams, in milliseconds.

    rate  number of streams started per second

    The time is counted from the moment at which a request should have been sent, so that a late
    send increases it.
    """

    def measure(running: Running, pace: Pace, work: Path) -> Numbers:
        bodies = write_bodies(work / "short", [paced(*SHORT_STREAM)])
        report = drive(
            running, pace, bodies, mode="open", rate=rate, events_per_stream=SHORT_EVENTS
        )
        return {"others": report["others"]} | {q: report["ttft_s"][q] * 1e3 for q in ("p50", "p99")}

    return measure


def find_half_load_rate(running: Running, work: Path) -> float:
    """Return the number of short streams per second that use half of the gateway's CPU core."""
    bodies = write_bodies(work / "short", [paced(*SHORT_STREAM)])
    rate = 500.0
    # The cost of a stream falls as more arrive at once, so measure again near the result.
    for _ in range(2):
        report = drive(running, Pace(1500, 500), bodies, mode="open", rate=rate)
        rate *= 0.5 / max(report["cpu_s"] / report["window_s"], 0.01)
        rate = min(rate, 5000.0)
    return rate


def rss_per_stream_kib(running: Running, pace: Pace, work: Path, count: int = 2000) -> Numbers:
    """Measure how much resident memory (RSS) the gateway needs for each open stream, in KiB.

    count  number of streams that are open at the same time
    """
    warm = write_bodies(work / "warm", [paced(4, 1000, 1000)])
    drive(running, Pace(1000, 100), warm, mode="closed", connections=8)
    before = rss_bytes(running.pids)
    bodies = write_bodies(work / "held", [paced(60, 1_000_000, 100_000)])
    command = [
        str(BIN / "load"),
        "--port",
        str(running.system.port),
        "--bodies",
        str(bodies),
        "--mode",
        "closed",
    ]
    command += [
        "--connections",
        str(count),
        "--ramp-ms",
        "2000",
        "--warmup-ms",
        "1000",
        "--window-ms",
        "2000",
    ]
    with subprocess.Popen(pinned(LOAD_CORE, command), stdout=subprocess.PIPE, text=True) as load:
        time.sleep(4.0)
        during = rss_bytes(running.pids)
        report = json.loads(load.communicate(timeout=30)[0])
    if any(report["errors"].values()) or min(report["streaming"]) < count:
        raise NotMeasurable(
            f"of {count} streams, {report['streaming']} were open when the measured period began "
            f"and when it ended: {report['errors']} failed"
        )
    return {"rss": (during - before) / count / 1024}


def all_cells(rate: float) -> list[Cell]:
    """Return all cells of the benchmark; each cell is one kind of traffic.

    rate  streams per second that use half of the gateway's core, for the cells with that load
    """
    with_direct = {**ROUND_ROBIN, "direct": "none"}
    low, high = (
        "TTFT on reused connections, 50 streams/s",
        f"TTFT at half load, {rate:.0f} streams/s",
    )
    return [
        *_cpu_cells(),
        Cell(
            with_direct,
            ttft_ms(50),
            (
                Row(f"{low}, p50", "ms", "p50", {"direct": 1.0}, added=True),
                Row(f"{low}, p99", "ms", "p99", added=True),
            ),
        ),
        Cell(
            with_direct,
            ttft_ms(rate),
            (
                Row(f"{high}, p50", "ms", "p50", added=True),
                Row(f"{high}, p99", "ms", "p99", {"nginx": 1.0}, added=True),
            ),
        ),
        Cell(
            ROUND_ROBIN,
            rss_per_stream_kib,
            (Row("memory per open stream, 2,000 open", "KiB", "rss", limit=48.0),),
            fresh=True,
        ),
    ]


def _cpu_cells() -> list[Cell]:
    def cpu(name: str, measure: Measure, policies: dict[str, str], goals: dict[str, float]) -> Cell:
        return Cell(policies, measure, (Row(name, "µs CPU", "cpu", goals),))

    steady = streams(400, paced(300, 10_000, 5_000), 304)
    burst = streams(200, paced(640, 300_000, 5_000, burst=64), 644)
    joined = streams(200, paced(640, 300_000, 5_000, burst=64, join=1), 644)
    round_robin = {"nginx": 1.7, "sglang-router": 0.6, "vllm-router": 0.6, "smg": 0.35}
    every_router = dict.fromkeys(ROUTERS, 0.8)
    return [
        cpu("request, round robin", cpu_per_request, ROUND_ROBIN, round_robin),
        cpu("request, default policy", cpu_per_request, DEFAULTS, {"vllm-router": 0.7}),
        cpu("request, prefix_aware", cpu_per_request, PREFIX_AWARE, {"nginx": 1.9}),
        cpu("chunk, 400 streams × 10 ms", steady, ROUND_ROBIN, {"nginx": 1.08, **every_router}),
        cpu("chunk, bursts of 64", burst, ROUND_ROBIN, {"nginx": 1.1, **every_router}),
        cpu("chunk, bursts of 64 in one write", joined, ROUND_ROBIN, {}),
        *(
            cpu(
                f"request, {name}, {tokens // 1000}k-token prompt",
                long_prompts(tokens),
                policies,
                {"sglang-router": 0.5},
            )
            for name, policies in (("default policy", DEFAULTS), ("prefix_aware", PREFIX_AWARE))
            for tokens in (2_000, 8_000, 32_000, 100_000)
        ),
    ]

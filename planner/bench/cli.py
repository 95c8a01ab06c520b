"""The command `penstock bench`: converts its options to a benchmark plan, and prints the report.

The gateway's command line registers this command. Exit status:

- 0: success
- 1: no answer, server unreachable, or run interrupted
- 2: wrong usage
"""

from __future__ import annotations

import asyncio
import re
import signal
from pathlib import Path
from typing import Annotated, Any

import msgspec
import uvloop

from command_line import Option, UsageError, write_line
from planner.bench.bench_options import BenchPlan, BenchSlo, PlanError, with_defaults
from planner.bench.client import BenchError
from planner.bench.json_report import BenchReport
from planner.bench.open_and_closed_loop import Watch, run
from planner.bench.show import LiveProgress, lines, table
from planner.output_files import check_writable
from planner.progress_bar import can_show_progress
from planner.traces import TraceError

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_UNITS_S = (("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0))
_WARMUP = 8


def duration_s(value: str) -> float:
    """Parse a duration such as 250ms, 30s, 5m or 1h, and return it in seconds.

    Raises UsageError if the text is invalid.
    """
    match = _DURATION.fullmatch(value)
    if match is None or float(match[1]) == 0:
        raise UsageError(f"{value!r} is not a valid duration; examples are 250ms, 30s and 5m")
    return float(match[1]) * dict(_UNITS_S)[match[2]]


def _time(text: str, name: str) -> Any:
    return Option(name, parse=duration_s, metavar="TIME", help=text)


Url = Annotated[
    str,
    Option(help="URL of the server to send requests to, for example http://127.0.0.1:8080."),
]
Model = Annotated[
    str | None,
    Option(help="Model to request. Default: the first model that the server lists."),
]
Shape = Annotated[str, Option(help="Kind of traffic: chat, rag, agent or shared-prefix.")]
Rate = Annotated[
    float | None,
    Option(
        min=1e-3,
        help=(
            "Mean number of requests per second, sent at random times without waiting for answers "
            "(open loop)."
        ),
    ),
]
Users = Annotated[
    int | None,
    Option(
        min=1,
        help="Number of users, each of whom waits for an answer before the next request (closed "
        "loop). Default: 8.",
    ),
]
Requests = Annotated[
    int | None, Option(min=1, help="Stop after this many requests have been sent.")
]
Warmup = Annotated[
    bool, Option("--warmup", help=f"Send {_WARMUP} requests first that are not counted.")
]
Seed = Annotated[int, Option(help="Random seed. Runs with the same seed send the same requests.")]
Trace = Annotated[
    Path | None,
    Option(
        is_file=True,
        help="Replay the requests of a recorded Mooncake trace (.jsonl or .jsonl.gz).",
    ),
]
Speed = Annotated[
    float,
    Option(min=1e-3, help="With --trace: factor on the recorded request rate; 2 is twice as fast."),
]
Limit = Annotated[
    int | None,
    Option(min=1, help="With --trace: replay only this many requests, from the beginning."),
]
Think = Annotated[
    float,
    Option(min=0, help="Factor on the pauses between the turns of a session; 0: no pauses."),
]
IgnoreEos = Annotated[
    bool,
    Option(
        "--ignore-eos",
        help="Ask engines to generate the full requested length and not to stop earlier (vLLM, "
        "SGLang).",
    ),
]
ApiKey = Annotated[
    str | None,
    Option(envvar="OPENAI_API_KEY", help="API key to send with each request, as a bearer token."),
]
AsJson = Annotated[bool, Option("--json", help="Print the report as JSON instead of text.")]
Out = Annotated[
    Path | None,
    Option(
        check=check_writable,
        help="File to which the report is also written, as JSON.",
    ),
]
For = Annotated[float | None, _time("How long to send requests (default: 30s).", "--for")]
SloTtft = Annotated[
    float | None,
    _time("Maximum TTFT of a request that counts for goodput, for example 2s.", "--slo-ttft"),
]
SloTpot = Annotated[
    float | None,
    _time("Maximum TPOT of a request that counts for goodput, for example 50ms.", "--slo-tpot"),
]


def bench(
    url: Url,
    model: Model = None,
    shape: Shape = "chat",
    rate: Rate = None,
    concurrency: Users = None,
    duration: For = None,
    requests: Requests = None,
    warmup: Warmup = False,
    seed: Seed = 0,
    slo_ttft: SloTtft = None,
    slo_tpot: SloTpot = None,
    trace: Trace = None,
    speed: Speed = 1.0,
    limit: Limit = None,
    think: Think = 1.0,
    ignore_eos: IgnoreEos = False,
    api_key: ApiKey = None,
    as_json: AsJson = False,
    out: Out = None,
) -> None:
    """Put load on an OpenAI-compatible server, and measure latencies, throughput and goodput."""
    plan = BenchPlan(
        url=url,
        model=model,
        shape=shape,
        rate=rate,
        concurrency=concurrency,
        duration_s=duration,
        requests=requests,
        trace=trace,
        speed=speed,
        limit=limit,
        think=think,
        warmup=_WARMUP if warmup else 0,
        seed=seed,
        slo=BenchSlo(slo_ttft, slo_tpot),
        ignore_eos=ignore_eos,
        api_key=api_key,
    )
    report = _run_or_exit(plan, quiet=as_json)
    _print(report, as_json, out)
    raise SystemExit(1 if report.interrupted or not report.completed else 0)


def _run_or_exit(plan: BenchPlan, quiet: bool) -> BenchReport:
    # Run the plan and return its report; exit with a message if there is none.
    try:
        return _run(with_defaults(plan), quiet)
    except PlanError as error:
        raise UsageError(str(error)) from None
    except (BenchError, TraceError) as error:
        write_line(f"penstock bench: {error}", err=True)
        raise SystemExit(1) from None
    except asyncio.CancelledError:  # Ctrl-C before the first counted request
        raise SystemExit(1) from None


def _run(plan: BenchPlan, quiet: bool) -> BenchReport:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if quiet or not can_show_progress():
            return runner.run(_until_interrupted(plan, None))
        from rich.console import Console

        with LiveProgress(plan, Console(stderr=True)) as live:
            return runner.run(_until_interrupted(plan, live.watch))


async def _until_interrupted(plan: BenchPlan, watch: Watch | None) -> BenchReport:
    # Run the plan until its end or Ctrl-C, which ends the run early with a report.
    task = asyncio.create_task(run(plan, watch))
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    return await task


def _print(report: BenchReport, as_json: bool, out: Path | None) -> None:
    text = msgspec.json.format(msgspec.json.encode(report.as_json()), indent=2).decode()
    if out is not None:
        out.write_text(text + "\n")
    if as_json:
        write_line(text)
        return
    write_line("\n".join([*table(report), *lines(report)]))

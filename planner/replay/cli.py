"""The command `penstock replay`: converts its options to a Comparison, and prints the result.

The result is a table, JSON or an HTML page. Exit status:

- 0: success
- 1: a file could not be read, nothing was served, or a capacity could not be determined
- 2: wrong usage
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec

from command_line import Argument, Option, UsageError, write_line
from planner.output_files import check_writable
from planner.progress_bar import progress_bar
from planner.replay import argument_parsing, fault_grammar
from planner.replay.fleet_spec import FleetError, FleetSpec, preset, read_fleet
from planner.replay.html_report import HEADS, cells_of, page
from planner.replay.replay_options import ClientBehaviour, ReplayOptions
from planner.replay.results import RequestEnd
from planner.replay.service_classes import parse_classes
from planner.replay.sweep import Comparison, ComparisonResult, UnknownCapacity, compare
from planner.replay.terminal_tables import figure_tables, table
from planner.traces import READERS, TraceError, TraceRequest, read_trace, slice_span
from policies import policy_registry
from policies.admission_registry import build_admission
from policies.policy_registry import PolicyConfigError

_EXPECTED = 350

Trace = Annotated[
    Path,
    Argument(
        is_file=True,
        help="File of recorded traffic, or a .yaml file that describes a mix of several files.",
    ),
]
Fleet = Annotated[
    str,
    Option(
        help=(
            "Fleet to simulate: a preset (F1-F4, F6), F5:6p2d@50 (6 prefill and 2 decode groups, "
            "links of 50 GB/s), or a YAML or JSON file."
        )
    ),
]
Policies = Annotated[
    str,
    Option(
        "--policy",
        metavar="A,B,...",
        help="Names of the routing policies to compare, separated by commas.",
    ),
]
Door = Annotated[
    str,
    Option(
        "--admission",
        help=("Admission policy: none, cap, or another name listed in docs/admission.md."),
    ),
]
Rates = Annotated[
    str | None,
    Option(
        "--rate",
        metavar="X,...",
        help=(
            "Request rates to replay, as multiples of the recorded rate, such as 0.5,1,2 "
            "(default 1)."
        ),
    ),
]
Users = Annotated[
    str | None,
    Option(
        "--users",
        metavar="N,...",
        help="Numbers of users to simulate instead of request rates. Each user waits for an "
        "answer before the next request (closed loop).",
    ),
]
Targets = Annotated[
    str | None,
    Option(
        "--capacity",
        metavar="90,99",
        help=(
            "Find the highest load at which this percentage of requests meets the latency "
            "targets of --slo."
        ),
    ),
]
Slos = Annotated[
    str,
    Option(
        "--slo",
        help="Latency targets such as ttft=2s,tpot=50ms, or a YAML file of service classes.",
    ),
]
Faults = Annotated[
    str, Option("--faults", help=f"Faults to simulate, comma-separated: {fault_grammar.FAULTS}.")
]
Format = Annotated[
    str | None,
    Option(
        "--format",
        help=f"Format of the trace: {', '.join(READERS)}; by default it is detected from the file.",
    ),
]
From = Annotated[
    str,
    Option(
        "--from",
        metavar="TIME",
        help=("Replay only requests that were recorded at this time or later."),
    ),
]
To = Annotated[
    str | None,
    Option(
        "--to", metavar="TIME", help="Replay only requests that were recorded before this time."
    ),
]
Warmup = Annotated[
    str,
    Option(
        "--warmup",
        metavar="TIME",
        help=(
            "Length of the warm-up: earlier requests fill caches, but are not counted in the "
            "results."
        ),
    ),
]
For = Annotated[
    str | None,
    Option(
        "--for",
        metavar="TIME",
        help="Simulated time at which the replay ends. Default: 20m with --users, otherwise the "
        "end of the last request.",
    ),
]
Retries = Annotated[
    int,
    Option(
        min=0,
        max=100,
        help=("Number of times that a client retries a request after status 429 (refused)."),
    ),
]
Stubborn = Annotated[
    bool,
    Option(
        "--ignore-retry-after",
        help=(
            "Let clients retry after their own back-off instead of the gateway's Retry-After time."
        ),
    ),
]
Patience = Annotated[
    str | None,
    Option(
        "--patience",
        metavar="TIME",
        help=("Time without a first token after which clients give up, such as 30s."),
    ),
]
Expected = Annotated[
    int, Option(min=1, help="Number of output tokens that the gateway assumes for each request.")
]
Seed = Annotated[
    int, Option(help="Random seed of the simulation. Replays with the same seed are equal.")
]
AsJson = Annotated[bool, Option("--json", help="Print the result as JSON instead of text.")]
Report = Annotated[
    Path | None,
    Option(
        "--report",
        check=check_writable,
        help="File to which an HTML page with charts is written.",
    ),
]


def replay(
    trace: Trace,
    fleet: Fleet = "F1",
    policy: Policies = "round_robin,least_loaded,prefix_aware",
    admission: Door = "none",
    rate: Rates = None,
    users: Users = None,
    capacity: Targets = None,
    slo: Slos = "ttft=5s,tpot=100ms",
    faults: Faults = "",
    format_: Format = None,
    from_: From = "0s",
    to: To = None,
    warmup: Warmup = "0s",
    for_: For = None,
    retries: Retries = 0,
    ignore_retry_after: Stubborn = False,
    patience: Patience = None,
    expected_output: Expected = _EXPECTED,
    seed: Seed = 0,
    as_json: AsJson = False,
    report: Report = None,
) -> None:
    """Compare routing policies on recorded traffic, with simulated engines in virtual time."""
    try:
        patience_s = None if patience is None else argument_parsing.parse_seconds(patience)
        clients = ClientBehaviour(retries, not ignore_retry_after, patience_s)
        options = ReplayOptions(seed, expected_output=expected_output, clients=clients)
        options = _with_times(options, slo, for_, has_users=users is not None)
        spec, options = fault_grammar.apply_faults(faults, _fleet(fleet), options)
        comparison = Comparison(
            fleet=spec,
            requests=_requests(trace, format_, from_, to),
            policies=_policy_names(policy),
            admission=None if admission == "none" else admission,
            loads=tuple(argument_parsing.parse_loads(users or rate or "1")),
            by_users=users is not None,
            targets=tuple(target / 100 for target in argument_parsing.parse_loads(capacity))
            if capacity
            else (),
            warmup_s=argument_parsing.parse_seconds(warmup),
            options=options,
        )
        _check(comparison, both=users is not None and rate is not None)
    except (argument_parsing.ArgumentError, FleetError, PolicyConfigError) as error:
        raise UsageError(str(error)) from None
    except TraceError as error:
        write_line(f"penstock replay: {error}", err=True)
        raise SystemExit(1) from None
    result = _run(comparison, quiet=as_json)
    if report is not None:
        report.write_text(page(result, trace.name))
    _print(result, as_json)
    missing = _missing(result)
    for line in missing:
        write_line(f"penstock replay: {line}", err=True)
    served = any(RequestEnd.SERVED in point.figures.ends for point in result.points)
    raise SystemExit(0 if served and not missing else 1)


def _with_times(
    options: ReplayOptions, slo: str, for_: str | None, has_users: bool
) -> ReplayOptions:
    # Return the options with the service classes and the end of the replay.
    #
    # A closed loop (a fixed number of users) ends after 20 minutes by default.
    standard, classes = parse_classes(slo)
    horizon_s = 1200.0 if has_users else None
    if for_ is not None:
        horizon_s = argument_parsing.parse_seconds(for_)
    return msgspec.structs.replace(options, standard=standard, classes=classes, horizon_s=horizon_s)


def _fleet(text: str) -> FleetSpec:
    path = Path(text)
    return read_fleet(path) if path.suffix in (".yaml", ".yml", ".json") else preset(text)


def _requests(trace: Path, kind: str | None, from_: str, to: str | None) -> list[TraceRequest]:
    span = (
        argument_parsing.parse_seconds(from_),
        None if to is None else argument_parsing.parse_seconds(to),
    )
    requests = slice_span(read_trace(trace, kind), *span)
    if not requests:
        raise TraceError(f"{trace}: no request from {from_} to {to or 'the end'}")
    return requests


def _policy_names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for name in names:
        policy_registry.build(name, {})
    if not names:
        raise argument_parsing.ArgumentError("--policy requires at least one policy name")
    return names


def _check(comparison: Comparison, both: bool) -> None:
    if both:
        raise argument_parsing.ArgumentError(
            "--rate (open loop) and --users (closed loop) exclude each other; give only one of them"
        )
    if any(target >= 1 for target in comparison.targets):
        raise argument_parsing.ArgumentError("--capacity requires percentages below 100")
    if comparison.admission is not None:
        build_admission(comparison.admission, {})


def _run(comparison: Comparison, quiet: bool) -> ComparisonResult:
    with progress_bar(quiet) as show_progress:
        return compare(comparison, show_progress)


def _missing(result: ComparisonResult) -> list[str]:
    return [
        f"{name}: no capacity at {capacity.target:.0%}: {capacity.reason}; use a shorter --warmup"
        for name, results in result.capacities.items()
        for capacity in results
        if isinstance(capacity, UnknownCapacity)
    ]


def _print(result: ComparisonResult, as_json: bool) -> None:
    if as_json:
        write_line(msgspec.json.format(msgspec.json.encode(as_plain(result)), indent=2).decode())
        return
    from rich.console import Console

    console = Console(file=sys.stdout)  # in a pipe, the width is COLUMNS or 80
    for each in figure_tables(HEADS, [cells_of(point) for point in result.points], console.width):
        console.print(each)
    for number, target in enumerate(result.comparison.targets):
        loads = [
            (name, result.capacities[name][number].load) for name in result.comparison.policies
        ]
        rows = [[name, "–" if load is None else f"{load:.3g}"] for name, load in loads]
        console.print(table(("policy", f"capacity at {target:.0%}"), rows))


def as_plain(result: ComparisonResult) -> dict[str, Any]:
    """Return a comparison of policies as a JSON object: results by policy and load, and capacities.

    Single requests are left out.
    """
    comparison = result.comparison
    return {
        "schema": "penstock-replay/1",
        "fleet": comparison.fleet,
        "requests": len(comparison.requests),
        "admission": comparison.admission or "none",
        "options": comparison.options,
        "points": [
            {"policy": p.policy, "load": p.load, "figures": p.figures} for p in result.points
        ],
        "capacities": result.capacities,
    }

"""`make bench`: compares Penstock with nginx and three LLM routers under the same load.

    python bench/compare_routers.py [--quick] [--rounds N] [--systems a,b] [--cells TEXT] [--rate R]
                          [--seed S] [--sources-only] [--json] [--out FILE] [--write-docs] [--check]

The routers are sglang-router, its successor SMG, and vllm-router. Penstock is measured twice:
compiled, and from its Python sources.

Each kind of traffic is measured in several rounds, with all systems in a new random order, so that
other load on the machine affects all of them equally. The measured gateway has one core alone; the
load generator and the backend share another one. docs/performance.md explains the numbers.

Exit status: 0 if measured, 1 if --check is given and a goal is missed, 2 for invalid options.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from compare_routers_table import Results, as_json, markdown, verdicts, write_docs
from compared_systems import (
    OURS,
    ROOT,
    SOURCES,
    NotMeasurable,
    Running,
    System,
    all_systems,
    backend,
    build_tools,
    compile_penstock,
    describe_build,
    free_base,
    install_nginx,
    install_peers,
    start,
    start_second,
)
from traffic_cells import Cell, Pace, all_cells, find_half_load_rate


def main() -> int:
    """Compare all gateways: install, start and measure each, and print the table.

    Return the exit status.
    """
    options = _options()
    build_tools()
    install_nginx()
    missing = install_peers() | _compile(options)
    base = free_base()
    wanted = [
        s
        for s in all_systems(base)
        if s.name not in missing and (not options.systems or s.name in options.systems)
    ]
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        stack.enter_context(backend(base))
        results = Results([], problems=dict(missing))
        fleet = _start_all(wanted, work, results, stack)
        results.settings = {"rounds": options.rounds, "quick": options.quick, "seed": options.seed}
        is_compiled = OURS in {system.name for system in wanted}
        results.settings["built"] = describe_build(compiled=is_compiled)
        _measure_all(fleet, options, work, results)
    return _report(results, options)


def _compile(options: argparse.Namespace) -> dict[str, str]:
    if options.sources_only:
        return {OURS: "--sources-only"}
    return compile_penstock() if not options.systems or OURS in options.systems else {}


def _start_all(
    wanted: list[System], work: Path, results: Results, stack: ExitStack
) -> dict[str, Running]:
    fleet: dict[str, Running] = {}
    for system in wanted:
        _log(f"starting {system.key}")
        try:
            running = start(system, work)
        except NotMeasurable as error:
            results.problems[system.key] = str(error)
            _log(f"  not measured: {error}")
            continue
        stack.callback(running.stop)
        fleet[system.key] = running
    return fleet


def _measure_all(
    fleet: dict[str, Running], options: argparse.Namespace, work: Path, results: Results
) -> None:
    rate = options.rate or _choose_rate(fleet, work)
    cells = [
        cell for cell in all_cells(rate) if any(options.cells in row.name for row in cell.rows)
    ]
    results.rows = [row for cell in cells for row in cell.rows]
    results.settings["half_load_streams_per_s"] = rate
    order = random.Random(options.seed)
    pace = Pace(1200, 300) if options.quick else Pace()
    for round_number in range(options.rounds):
        for cell in cells:
            names = [
                (name, policy)
                for name, policy in cell.policies.items()
                if f"{name}/{policy}" in fleet
            ]
            order.shuffle(names)
            for name, policy in names:
                _log(f"round {round_number + 1}/{options.rounds}: {cell.rows[0].name}: {name}")
                _measure(cell, fleet[f"{name}/{policy}"], round_number, pace, work, results)


def _choose_rate(fleet: dict[str, Running], work: Path) -> float:
    # Return the request rate at which our gateway's core is half busy.
    #
    # If ours is not measured, a peer's rate is used. All systems get the same rate.
    for key in (
        f"{OURS}/round_robin",
        f"{SOURCES}/round_robin",
        "sglang-router/round_robin",
        "nginx/round_robin",
    ):
        if key in fleet:
            return find_half_load_rate(fleet[key], work)
    return 1000.0


def _measure(
    cell: Cell, running: Running, round_number: int, pace: Pace, work: Path, results: Results
) -> None:
    system = running.system
    try:
        subject = start_second(system, work) if cell.fresh else running
        try:
            numbers = cell.measure(subject, pace, work)
        finally:
            if subject is not running:
                subject.stop()
    except NotMeasurable as error:
        results.problems[f"{system.name}, {cell.rows[0].name}"] = str(error)
        _log(f"  not measured: {error}")
        return
    if "others" in numbers:
        results.others.append(numbers["others"])
    for row in cell.rows:
        results.add(row, system.name, round_number, numbers[row.metric])


def _report(results: Results, options: argparse.Namespace) -> int:
    text = json.dumps(as_json(results), indent=2)
    if options.out:
        Path(options.out).write_text(text + "\n")
    if options.write_docs:
        write_docs(ROOT / "docs" / "performance.md", results)
    print(text if options.json else markdown(results))
    results_of_goals = verdicts(results)
    has_missed = not results_of_goals or any(not verdict.met for verdict in results_of_goals)
    return 1 if options.check and has_missed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="compare_routers.py",
        description="Compare penstock with other gateways on this machine.",
    )
    parser.add_argument(
        "--quick", action="store_true", help="measure only three rounds with short periods"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        help="number of rounds; each measures all systems (default: 7, or 3 with --quick)",
    )
    parser.add_argument(
        "--sources-only",
        action="store_true",
        help="do not compile the gateway; measure only its sources",
    )
    parser.add_argument("--seed", type=int, default=1, help="random seed of the measuring order")
    parser.add_argument(
        "--systems",
        type=lambda text: text.split(","),
        help="systems to measure, comma-separated (default: all)",
    )
    parser.add_argument(
        "--cells", default="", help="measure only the rows whose name contains this text"
    )
    parser.add_argument(
        "--rate",
        type=float,
        help="streams per second for the rows with half load (default: measured, so that half "
        "of a core is used)",
    )
    _add_output_options(parser)
    options = parser.parse_args()
    options.rounds = options.rounds or (3 if options.quick else 7)
    return options


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", help="file to which the JSON is also written")
    parser.add_argument(
        "--write-docs",
        action="store_true",
        help="write the table of results to docs/performance.md",
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with status 1 if a goal is missed"
    )


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""`make goodput`: measures the goodput of every routing policy, in simulated time.

    python bench/goodput.py --data TRACES [--quick] [--jobs 2]

Goodput is the number of requests per second that meet their latency budgets. A cell is one policy
on one workload. Its result is a line of JSON in build/goodput/.

An interrupted run can continue, because cells with a result there are not measured again. Results
are invalid once the code of the policies or the simulator changes, unless --any-code is given.
docs/goodput.md shows the tables.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.goodput_cells import Cell, Measurement, TraceFolder, measure
from bench.goodput_table import page
from policies import policy_registry

ROOT = Path(__file__).parents[1]
OURS = "priced"
START = {"conversation": 2.0, "conversation_tuned": 2.0, "b2b": 11.0, "azure": 10.0, "mix": 1.0}
FLEETS = {"b2b": "F2", "agents": "F3"}
USERS = (200, 280, 420, 560)  # with more than 280 users the contexts do not fit into the KV cache
TPOTS = (0.02, 0.03, 0.05, 0.1, 0.15)
ADMISSIONS = (
    "none",
    "cap",
    "early_rejection",
    "gie_saturation",
    "probabilistic",
    "session_pause",
    "priced",
)
GREED = (1.0, 10.0)
HANDWRITTEN = "## What is reached"
"""The heading of the first section of docs/goodput.md that is not generated."""
DECODERS = ("F5:6p2d@50", "F5:4p4d@50")


class Line(msgspec.Struct, frozen=True):
    """One line of the results file: a measurement, and the hash of the code that it measured.

    Measurements of older code are not reused.
    """

    code: str
    reading: Measurement


def capacity_cells(
    workloads: Iterable[str], policies: Iterable[str], seeds: Iterable[int], quick: bool
) -> Iterator[Cell]:
    """Yield the measurements (cells) of capacity at 90% and 99% attainment.

    Attainment is the share of requests that meet their latency budgets. Capacity is the highest
    load that reaches it.
    """
    for seed in seeds:
        for workload in workloads:
            for policy in policies:
                fleet = FLEETS.get(workload, "F1")
                yield Cell(
                    *("capacity", workload, policy, fleet),
                    load=START[workload],
                    targets=(0.9,) if quick else (0.9, 0.99),
                    seed=seed,
                    quick=quick,
                    table="capacity",
                )


def agent_cells(policies: Iterable[str], seeds: Iterable[int], quick: bool) -> Iterator[Cell]:
    """Yield the measurements (cells) of agent sessions, by number of users.

    Each number is measured with and without admission control.
    """
    for seed in seeds:
        for policy in policies:
            for users in USERS[1:] if quick else USERS:
                for admission in ("", "session_pause", "priced"):
                    yield Cell(
                        *("point", "agents", policy, "F3", admission, float(users)),
                        seed=seed,
                        quick=quick,
                        table="agents",
                    )


def overload_cells(
    measurements: Iterable[Measurement], workloads: Iterable[str], seeds: Iterable[int], quick: bool
) -> Iterator[Cell]:
    """Yield the measurements (cells) of overload: `priced` at 1, 2 and 3 times its capacity.

    Each load is measured with each admission rule. `measurements` must contain the capacities,
    which are measured first. The full slices of traces are used, because shorter ones end before
    the queues are full.
    """
    known = {
        (item.cell.workload, item.cell.seed): item.capacities["0.9"]
        for item in measurements
        if item.cell.table == "capacity" and item.cell.policy == OURS and item.cell.quick == quick
    }
    for (workload, seed), load in known.items():
        if workload not in workloads or seed not in seeds:
            continue
        for times in (1.0, 2.0, 3.0):
            for admission in ADMISSIONS:
                yield Cell(
                    *("point", workload, OURS, "F1", admission, round(load * times, 4)),
                    seed=seed,
                    table=f"overload x{times:g}",
                )


def trouble_cells(seeds: Iterable[int], quick: bool) -> Iterator[Cell]:
    """Yield the measurements (cells) of capacity while the gateway's information is bad.

    Either the metrics of engines are outdated, or messages about their caches are lost. Each
    measurement (cell) is one policy on one workload.
    """
    for seed in seeds:
        for workload in ("conversation", "b2b"):
            for trouble in ("", "stale", "lost"):
                yield Cell(
                    *("capacity", workload, OURS, FLEETS.get(workload, "F1")),
                    load=START[workload],
                    targets=(0.9,),
                    seed=seed,
                    quick=quick,
                    table="trouble",
                    trouble=trouble,
                )


def tenant_cells(seeds: Iterable[int], quick: bool) -> Iterator[Cell]:
    """Yield measurements of how well a tenant is served while another one sends more.

    The other tenant sends the same load, or ten times as much. Each measurement (cell) is one
    policy on one workload.
    """
    for seed in seeds:
        for policy, admission in (
            (OURS, "priced"),
            ("prefix_aware", "priced"),
            ("prefix_aware", "cap"),
        ):
            for greed in GREED:
                yield Cell(
                    *("point", "tenants", policy, "F1", admission, greed),
                    seed=seed,
                    quick=quick,
                    table="tenants",
                )


def split_cells(seeds: Iterable[int], quick: bool) -> Iterator[Cell]:
    """Yield the measurements (cells) of capacity at several limits on the time per output token.

    Each limit is measured with and without splitting requests into prefill and decode on different
    engines.
    """
    rivals = [("F1", "priced"), ("F1", "llmd_blend"), ("F1:pairs", "priced")]
    rivals += [(fleet, "prefix_aware") for fleet in DECODERS]
    for seed in seeds:
        for tpot_s in TPOTS:
            for fleet, policy in rivals:
                yield Cell(
                    *("capacity", "conversation", policy, fleet),
                    load=1.5,
                    targets=(0.9,),
                    seed=seed,
                    tpot_s=tpot_s,
                    quick=quick,
                    table="split",
                )


class Results:
    """The results of finished cells in build/goodput/results.jsonl.

    Only this class writes that file.
    """

    def __init__(self, folder: Path, any_code: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.code = folder / "results.jsonl", code_digest()
        self.known: dict[Cell, Measurement] = {}
        if self.path.exists():
            for row in self.path.read_bytes().splitlines():
                line = msgspec.json.decode(row, type=Line)
                if any_code or line.code == self.code:
                    self.known[line.reading.cell] = line.reading

    def add(self, reading: Measurement) -> None:
        self.known[reading.cell] = reading
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(Line(self.code, reading)) + b"\n")


def code_digest() -> str:
    digest = hashlib.blake2b(digest_size=8)
    for folder in ("policies", "planner/replay", "planner/traces", "mockgpu"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def run(
    cells: Iterable[Cell],
    results: Results,
    traces: TraceFolder,
    jobs: int,
    log: Callable[[str], None],
) -> None:
    missing = [cell for cell in dict.fromkeys(cells) if cell not in results.known]
    with ProcessPoolExecutor(jobs, initializer=os.nice, initargs=(10,)) as pool:
        futures = [pool.submit(measure, cell, traces) for cell in missing]
        for number, future in enumerate(as_completed(futures), 1):
            reading = future.result()
            results.add(reading)
            log(f"{number}/{len(missing)} {describe(reading)}")


def describe(reading: Measurement) -> str:
    cell, figures = reading.cell, reading.figures
    name = " ".join(
        filter(None, (cell.workload, cell.fleet, cell.policy, cell.admission, f"seed {cell.seed}"))
    )
    if cell.tpot_s is not None:
        name += f" tpot {cell.tpot_s * 1e3:g} ms"
    capacities = " ".join(f"cap{target} {load:.3f}" for target, load in reading.capacities.items())
    return (
        f"{name}: {capacities} at {figures['load']:.3g}: attained {figures['attainment']:.3f}, "
        f"{figures['goodput']:.2f} good/s, hits {figures['hit_ratio']:.3f} "
        f"({reading.runs} runs, {reading.wall_s:.0f} s)"
    )


def handwritten_part(path: Path) -> str:
    """Return the handwritten text of docs/goodput.md, which follows the generated tables."""
    text = path.read_text() if path.exists() else ""
    _, heading, remainder = text.partition(HANDWRITTEN)
    return heading + remainder


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the recorded traces")
    _add_cell_options(parser)
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        help="number of processes that run simulations at the same time (default: one per core)",
    )
    parser.add_argument(
        "--any-code",
        action="store_true",
        help="keep results that were measured with other versions of the code",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "build" / "goodput",
        help="folder for the results of all cells; those already there are kept (default: "
        "build/goodput)",
    )
    parser.add_argument("--page", type=Path, help="Markdown file to which the tables are written")
    return parser.parse_args()


def _add_cell_options(parser: argparse.ArgumentParser) -> None:
    # Add the options that choose the cells to measure.
    parser.add_argument(
        "--quick",
        action="store_true",
        help="use one seed, shorter slices of the traces and fewer loads",
    )
    parser.add_argument("--seeds", type=int, help="number of seeds (default: 3, or 1 with --quick)")
    parser.add_argument(
        "--tables",
        default="capacity,agents,overload,split,trouble,tenants",
        help="names of the tables to measure, separated by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--gated",
        default="priced,llmd_blend,llmd_predictor",
        help="policies to measure for the table `agents`, separated by commas",
    )
    parser.add_argument(
        "--workloads",
        default="conversation,b2b,azure,mix",
        help="workloads of the table `capacity`, separated by commas (default: %(default)s)",
    )
    parser.add_argument(
        "--policies",
        default=",".join(policy_registry.names()),
        help="policies to measure, separated by commas (default: all)",
    )


def main() -> None:
    args = _options()
    results, traces = Results(args.out, args.any_code), TraceFolder(str(args.data))
    seeds = range(1, (args.seeds or (1 if args.quick else 3)) + 1)
    tables, policies = args.tables.split(","), args.policies.split(",")
    plans: dict[str, Callable[[], Iterator[Cell]]] = {
        "capacity": lambda: capacity_cells(args.workloads.split(","), policies, seeds, args.quick),
        "agents": lambda: agent_cells(args.gated.split(","), seeds, args.quick),
        "overload": lambda: overload_cells(
            results.known.values(), args.workloads.split(","), seeds, args.quick
        ),
        "split": lambda: split_cells(seeds, args.quick),
        "trouble": lambda: trouble_cells(seeds, args.quick),
        "tenants": lambda: tenant_cells(seeds, args.quick),
    }
    for table in filter(None, tables):
        run(plans[table](), results, traces, args.jobs, lambda line: print(line, flush=True))
    if args.page:
        args.page.write_text(page(list(results.known.values())) + handwritten_part(args.page))


if __name__ == "__main__":
    main()

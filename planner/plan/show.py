"""Prints a comparison of configurations: a table per pool with before and after, or JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from planner.plan.comparison import ConfigComparison, PoolComparison
from planner.replay.results import ReplayFigures, ShareFigures

if TYPE_CHECKING:
    from rich.table import Table

NO_BLOCKS = (
    "the log has no block ids of prompts (observability.access_blocks): nothing is cached here, "
    "so this compares load and admission, and overstates prefill"
)


def show(plan: ConfigComparison) -> None:
    """Print the comparison of two gateway configurations on the terminal, a table per pool."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print(
        f"{plan.requests} requests in {plan.span_s:.0f} s, on mock groups and a virtual clock"
    )
    if not plan.blocks:
        console.print(NO_BLOCKS, style="yellow", markup=False)
    for pool in plan.pools:
        console.print(f"pool {pool.pool}", style="bold", markup=False)
        for note in pool.notes:
            console.print(f"  {note}", markup=False)
        if pool.before is not None or pool.after is not None:
            console.print(_table(pool))


def as_plain(plan: ConfigComparison) -> dict[str, Any]:
    return {
        "schema": "penstock-plan/1",
        "requests": plan.requests,
        "span_s": plan.span_s,
        "blocks": plan.blocks,
        "pools": [
            {
                "pool": pool.pool,
                "gain": pool.gain,
                "notes": pool.notes,
                "before": pool.before,
                "after": pool.after,
            }
            for pool in plan.pools
        ],
    }


def _table(pool: PoolComparison) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for head in ("running", "candidate", "change"):
        table.add_column(head, justify="right", no_wrap=True)
    before, after = dict(_rows(pool.before)), dict(_rows(pool.after))
    for name in dict.fromkeys((*before, *after)):
        value_before, value_after = before.get(name), after.get(name)
        label, unit = name, ""
        if name.endswith((" %", " s", " ms")):
            label, _, unit = name.rpartition(" ")
        change = (
            ""
            if value_before is None or value_after is None
            else f"{value_after - value_before:+.4g}"
        )
        table.add_row(
            f"  {label}{f' ({unit})' if unit else ''}",
            _number(value_before),
            _number(value_after),
            change,
        )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _rows(figures: ReplayFigures | None) -> Iterator[tuple[str, float | None]]:
    if figures is None:
        return
    yield "attainment %", 100 * figures.attainment
    for percent in ("p50", "p99"):
        yield f"TTFT {percent} s", None if figures.ttft is None else getattr(figures.ttft, percent)
    for percent in ("p50", "p99"):
        yield (
            f"TPOT {percent} ms",
            None if figures.tpot is None else 1e3 * getattr(figures.tpot, percent),
        )
    yield "hit ratio %", 100 * figures.hit_ratio
    yield "shed", float(figures.ends.get("shed", 0))
    yield "policy us", figures.pick_us
    for name, share in figures.classes.items():
        yield from _of_class(name, share)


def _of_class(name: str, share: ShareFigures) -> Iterator[tuple[str, float | None]]:
    yield f"{name}: attainment %", 100 * share.attainment
    yield f"{name}: TTFT p99 s", share.ttft_p99_s

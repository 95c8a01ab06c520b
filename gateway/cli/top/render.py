"""Draws the live view with the library rich: totals, endpoints, KV flow, and the diagnosis.

All functions are pure: they convert a view to rich renderables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

View = Mapping[str, Any]

STYLES: Mapping[str, str] = {
    "up": "green",
    "returning": "yellow",
    "ejected": "bold red",
    "dead": "bold red",
    "draining": "cyan",
    "drained": "cyan",
    "leaving": "cyan",
}
GRADES: Mapping[str, str] = {"bad": "bold red", "warn": "yellow", "note": "dim"}
STATE_NAMES: Mapping[str, str] = {"dead": "DEAD", "ejected": "OUT"}
BARS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 20
MISSING = "-"

COLUMNS = (
    *(
        "group",
        "role",
        "layout",
        "state",
        "flight",
        "wait",
        "kv",
        "backlog",
        "hit",
        "ttft p95",
        "tpot p95",
    ),
    *("silent", "last minute"),
)
RIGHT_ALIGNED = frozenset(COLUMNS[4:12])


def render_view(view: View) -> Group:
    """Return the complete live view as a rich renderable, from the totals to the diagnosis."""
    parts: list[Any] = [*render_heading(view), "", render_fleet(view["endpoints"])]
    if view["flow"]["pairs"]:
        parts += ["", render_flow(view["flow"])]
    return Group(*parts, "", *render_diagnosis(view["why"]))


def render_heading(view: View) -> list[Text]:
    """Return the heading of the live view: two lines of totals.

    If there were requests, a third line shows how many met their latency targets (SLO attainment).
    """
    totals = view["totals"]
    config = view["config"]
    ttft = view["totals"]["ttft"]
    tpot = view["totals"]["tpot"]
    up = sum(row["available"] for row in view["endpoints"])
    shed = sum(totals["shed_per_s"].values())
    first = Text.assemble(
        ("penstock ", "bold"),
        f"v{config['version']}   {up} of {len(view['endpoints'])} up   ",
        f"{totals['requests_per_s']:.1f} req/s   {totals['tokens_per_s']:.0f} tok/s   ",
        f"{totals['streams']} in flight   {totals['waiting']} waiting   ",
        (f"{shed:.1f} rejected/s   ", "yellow" if shed else ""),
        (f"{totals['errors_per_s']:.1f} failed/s", "red" if totals["errors_per_s"] else ""),
    )
    ttft_style = "red" if (ttft["p95_s"] or 0.0) > ttft["budget_s"] else ""
    second = Text.assemble(
        (_spread(ttft), ttft_style),
        f" of {seconds_text(ttft['budget_s'])}   ",
        f"TPOT p95 {seconds_text(tpot['p95_s'])} of {seconds_text(tpot['budget_s'])}   ",
        f"prefix hits {percent_text(totals['prefix_hit'])}",
    )
    slos = "   ".join(
        f"{row['class']} SLO met {percent_text(row['ratio'])}" for row in totals["goodput"]
    )
    return [first, second, Text(slos)] if slos else [first, second]


def _spread(ttft: Mapping[str, Any]) -> str:
    if ttft.get("count") == 1:
        return f"TTFT {seconds_text(ttft['p50_s'])} (one request)"
    return "TTFT " + "  ".join(
        f"{name} {seconds_text(ttft[f'{name}_s'])}" for name in ("p50", "p95", "p99")
    )


def render_fleet(endpoints: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    for name in COLUMNS:
        table.add_column(name, justify="right" if name in RIGHT_ALIGNED else "left", no_wrap=True)
    for row in endpoints:
        table.add_row(*endpoint_cells(row))
    return table


def endpoint_cells(row: Mapping[str, Any]) -> list[Text]:
    style = STYLES.get(row["state"], "")
    dim = "" if row["available"] else "dim"
    return [
        Text(row["name"], "bold" if row["available"] else "bold red"),
        Text(row["role"], dim),
        Text(row["layout"], "dim"),
        Text(state_text(row), style),
        Text(f"{row['in_flight']}/{row['max_concurrency']}", dim),
        Text(MISSING if row["waiting"] is None else str(row["waiting"]), dim),
        Text(percent_text(row["kv"]), dim),
        Text(str(row["backlog_tokens"] or MISSING), dim),
        Text(percent_text(row["hit"]), dim),
        Text(seconds_text(row["ttft_p95_s"]), dim),
        Text(seconds_text(row["tpot_p95_s"]), dim),
        Text(
            f"{row['silence_s']:.1f}s" if row["silence_s"] > 0.5 else MISSING,
            "yellow" if row["silence_s"] > 2 else dim,
        ),
        Text(sparkline(row["spark"]), "cyan"),
    ]


def state_text(row: Mapping[str, Any]) -> str:
    """Return an endpoint's state as text, such as `up` or `OUT 14s connect_failed`."""
    state = STATE_NAMES.get(row["state"], row["state"])
    if row["state"] in ("up", "drained", "draining", "leaving") or row["since_s"] is None:
        return str(state)
    return f"{state} {row['since_s']:.0f}s {row['cause'] or ''}".rstrip()


def render_flow(view: Mapping[str, Any]) -> Table:
    """Return a table of handoffs from prefill endpoints (rows) to decode endpoints (columns).

    The heading shows the bytes per second, if engines report them.
    """
    pairs = {(pair["prefill"], pair["decode"]): pair for pair in view["pairs"]}
    columns = sorted({decode for _, decode in pairs})
    table = Table(box=None, pad_edge=False, header_style="dim")
    carried = "".join(
        f", {bytes_text(pair)}/s by {name}" for name, pair in view["kv_bytes_per_s"].items()
    )
    table.add_column(f"KV flow ({view['under_way']} in progress{carried})")
    for name in columns:
        table.add_column(name, justify="right")
    for prefill_name in sorted({prefill for prefill, _ in pairs}):
        table.add_row(
            Text(prefill_name, "bold"),
            *(_handoffs(pairs.get((prefill_name, column))) for column in columns),
        )
    return table


def _handoffs(pair: Mapping[str, Any] | None) -> Text:
    if pair is None:
        return Text(MISSING, "dim")
    lost = f" {pair['failed']} failed" if pair["failed"] else ""
    moved = "" if pair["kv_bytes_per_s"] is None else f"{bytes_text(pair['kv_bytes_per_s'])}/s "
    return Text.assemble(
        f"{pair['per_s']:.1f}/s {moved}",
        (f"p95 {seconds_text(pair['p95_s'])}", "dim"),
        (lost, "red"),
    )


def render_diagnosis(why: Sequence[Mapping[str, Any]]) -> list[Text]:
    """Return the sentences of the live view's diagnosis as styled lines, most severe first."""
    if not why:
        return [Text("no problems", "dim")]
    return [
        Text(
            f"{'!' if reason['grade'] == 'bad' else '·'} {reason['text']}", GRADES[reason["grade"]]
        )
        for reason in why
    ]


def sparkline(values: Sequence[int]) -> str:
    """Return a line of SPARK_WIDTH bars, each of which shows the largest value of its interval."""
    if not values:
        return ""
    width = max(1, len(values) // SPARK_WIDTH)
    parts = [max(values[start : start + width]) for start in range(0, len(values), width)]
    scale = max(4, *parts)
    return "".join(BARS[min(len(BARS) - 1, value * len(BARS) // (scale + 1))] for value in parts)


def percent_text(share: float | None) -> str:
    """Return a ratio (0 to 1) as text, for example "61.3%"; None gives a dash."""
    return MISSING if share is None else f"{share * 100:.1f}%"


def bytes_text(count: float) -> str:
    """Return a byte count as text with decimal units: 1.25 GB, 31.0 MB, 0 B."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def seconds_text(seconds: float | None) -> str:
    """Return a duration in seconds as text, for example 0.85s or 12ms; None gives a dash."""
    if seconds is None:
        return MISSING
    return f"{seconds * 1000:.0f}ms" if seconds < 0.9995 else f"{seconds:.2f}s"

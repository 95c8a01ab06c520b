"""The live view drawn with rich: totals, the fleet, the flow of KV, and why. Pure: a view in, something to print."""

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
NAMES: Mapping[str, str] = {"dead": "DEAD", "ejected": "OUT"}
BARS = "▁▂▃▄▅▆▇█"
SPARK = 20
NONE = "-"

COLUMNS = (
    *("group", "role", "layout", "state", "flight", "wait", "kv", "backlog", "hit", "ttft p95", "tpot p95"),
    *("silent", "last minute"),
)
RIGHT = frozenset(COLUMNS[4:12])


def board(view: View) -> Group:
    """Everything, top to bottom."""
    parts: list[Any] = [*heading(view), "", fleet(view["endpoints"])]
    if view["flow"]["pairs"]:
        parts += ["", flow(view["flow"])]
    return Group(*parts, "", *reasons(view["why"]))


def heading(view: View) -> list[Text]:
    """Two lines of totals, and one of promises where there were any."""
    totals, config, ttft, tpot = view["totals"], view["config"], view["totals"]["ttft"], view["totals"]["tpot"]
    up = sum(each["available"] for each in view["endpoints"])
    shed = sum(totals["shed_per_s"].values())
    first = Text.assemble(
        ("penstock ", "bold"),
        f"v{config['version']}   {up} of {len(view['endpoints'])} serve   ",
        f"{totals['requests_per_s']:.1f} req/s   {totals['tokens_per_s']:.0f} tok/s   ",
        f"{totals['streams']} in flight   {totals['waiting']} waiting   ",
        (f"{shed:.1f} refused/s   ", "yellow" if shed else ""),
        (f"{totals['errors_per_s']:.1f} failed/s", "red" if totals["errors_per_s"] else ""),
    )
    late = "red" if (ttft["p95_s"] or 0.0) > ttft["budget_s"] else ""
    second = Text.assemble(
        (_spread(ttft), late),
        f" of {time_of(ttft['budget_s'])}   TPOT p95 {time_of(tpot['p95_s'])} of {time_of(tpot['budget_s'])}   ",
        f"prefix hits {percent(totals['prefix_hit'])}",
    )
    kept = "   ".join(f"{each['class']} {percent(each['ratio'])} kept" for each in totals["goodput"])
    return [first, second, Text(kept)] if kept else [first, second]


def _spread(ttft: Mapping[str, Any]) -> str:
    """Percentiles of times to first token in the last minute; of a single one its value."""
    if ttft.get("count") == 1:
        return f"TTFT {time_of(ttft['p50_s'])} (one request)"
    return "TTFT " + "  ".join(f"{name} {time_of(ttft[f'{name}_s'])}" for name in ("p50", "p95", "p99"))


def fleet(endpoints: Sequence[Mapping[str, Any]]) -> Table:
    """One row per endpoint."""
    table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    for name in COLUMNS:
        table.add_column(name, justify="right" if name in RIGHT else "left", no_wrap=True)
    for each in endpoints:
        table.add_row(*cells(each))
    return table


def cells(each: Mapping[str, Any]) -> list[Text]:
    """The row of an endpoint, aligned with COLUMNS."""
    style = STYLES.get(each["state"], "")
    dim = "" if each["available"] else "dim"
    return [
        Text(each["name"], "bold" if each["available"] else "bold red"),
        Text(each["role"], dim),
        Text(each["layout"], "dim"),
        Text(state_of(each), style),
        Text(f"{each['in_flight']}/{each['max_concurrency']}", dim),
        Text(NONE if each["waiting"] is None else str(each["waiting"]), dim),
        Text(percent(each["kv"]), dim),
        Text(str(each["backlog_tokens"] or NONE), dim),
        Text(percent(each["hit"]), dim),
        Text(time_of(each["ttft_p95_s"]), dim),
        Text(time_of(each["tpot_p95_s"]), dim),
        Text(
            f"{each['silence_s']:.1f}s" if each["silence_s"] > 0.5 else NONE, "yellow" if each["silence_s"] > 2 else dim
        ),
        Text(spark(each["spark"]), "cyan"),
    ]


def state_of(each: Mapping[str, Any]) -> str:
    """up; OUT 14s connect_failed."""
    state = NAMES.get(each["state"], each["state"])
    if each["state"] in ("up", "drained", "draining", "leaving") or each["since_s"] is None:
        return str(state)
    return f"{state} {each['since_s']:.0f}s {each['cause'] or ''}".rstrip()


def flow(told: Mapping[str, Any]) -> Table:
    """Handoffs from prefill (rows) to decode (columns), and their bytes where engines tell."""
    pairs = {(each["prefill"], each["decode"]): each for each in told["pairs"]}
    columns = sorted({decode for _, decode in pairs})
    table = Table(box=None, pad_edge=False, header_style="dim")
    carried = "".join(f", {volume(each)}/s by {name}" for name, each in told["kv_bytes_per_s"].items())
    table.add_column(f"KV flow ({told['under_way']} under way{carried})")
    for name in columns:
        table.add_column(name, justify="right")
    for row in sorted({prefill for prefill, _ in pairs}):
        table.add_row(Text(row, "bold"), *(_handoffs(pairs.get((row, column))) for column in columns))
    return table


def _handoffs(pair: Mapping[str, Any] | None) -> Text:
    if pair is None:
        return Text(NONE, "dim")
    lost = f" {pair['failed']} failed" if pair["failed"] else ""
    moved = "" if pair["kv_bytes_per_s"] is None else f"{volume(pair['kv_bytes_per_s'])}/s "
    return Text.assemble(f"{pair['per_s']:.1f}/s {moved}", (f"p95 {time_of(pair['p95_s'])}", "dim"), (lost, "red"))


def reasons(why: Sequence[Mapping[str, Any]]) -> list[Text]:
    """The sentences, the gravest first."""
    if not why:
        return [Text("nothing to explain: all is well", "dim")]
    return [Text(f"{'!' if each['grade'] == 'bad' else '·'} {each['text']}", GRADES[each["grade"]]) for each in why]


def spark(values: Sequence[int]) -> str:
    """The line in SPARK characters, each the largest of its part."""
    if not values:
        return ""
    width = max(1, len(values) // SPARK)
    parts = [max(values[at : at + width]) for at in range(0, len(values), width)]
    most = max(4, *parts)
    return "".join(BARS[min(len(BARS) - 1, value * len(BARS) // (most + 1))] for value in parts)


def percent(share: float | None) -> str:
    """61.3%, or a dash."""
    return NONE if share is None else f"{share * 100:.1f}%"


def volume(count: float) -> str:
    """1.25 GB, 31.0 MB, 0 B: bytes by thousands, three digits."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def time_of(seconds: float | None) -> str:
    """0.85s, 12ms, or a dash."""
    if seconds is None:
        return NONE
    return f"{seconds * 1000:.0f}ms" if seconds < 0.9995 else f"{seconds:.2f}s"

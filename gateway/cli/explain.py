"""`penstock explain`: why a request went where it went, from GET /explain of a running gateway, for people.

Lives here: what is printed. Not here: what is known (gateway/telemetry/explain.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console
from rich.table import Table

from gateway.cli.admin_client import AdminAddress, Server, with_admin_options
from gateway.cli.output import Json, fail, print_json, say

NEWEST = "last"
MOST_ROWS = 16


@with_admin_options
def explain(
    admin: AdminAddress,
    request_id: Annotated[
        str, typer.Argument(metavar="ID", help="What x-request-id of its answer says; the newest unless given.")
    ] = NEWEST,
    as_json: Json = False,
) -> None:
    """Why a request went where it went: its promise, who was considered, what it cost, and how it came out."""
    told = Server(admin, None).ask("GET", f"/explain/{quote(request_id, safe='')}")
    if "id" not in told:
        fail(f"{request_id}: {told.get('message', 'not known')}")
    if as_json:
        print_json(told)
        return
    for line in lines(told):
        say(line)
    if told["pick"] is not None:
        Console(highlight=False).print(_table(told["pick"]))


def lines(told: Mapping[str, Any]) -> Iterator[str]:
    """The page of a request as an operator reads it, without its candidates."""
    yield f"{told['id']}: {told['model']}, {told['status']} {told['outcome']}{_of(told['tenant'])}"
    if "slo" in told:
        slo = told["slo"]
        yield f"  asked     {told['prompt_tokens']} prompt tokens, {told['output_tokens']} expected of the answer"
        budgets = f"first token within {slo['ttft_s']:g} s, then {slo['tpot_s'] * 1000:g} ms a token"
        yield f"  promised  {slo['name']}: {budgets}"
    admission = told["admission"]
    if admission["verdict"] == "admitted":
        waited = f"after {_ms(admission['waited_s'])}" if admission["waited_s"] >= 0.001 else "at once"
        yield f"  admitted  {waited}"
    else:
        yield f"  refused   {admission['reason'] or ''}: {admission['detail']}"
    if told["pick"] is not None:
        yield from _picked(told)
    yield from _outcome(told)


def _picked(told: Mapping[str, Any]) -> Iterator[str]:
    pick = told["pick"]
    others = len(pick["candidates"])
    yield f"  picked    {pick['endpoint']} of {others} by {pick['policy']}" + (
        f"; next best {pick['runner_up']}" if pick["runner_up"] else ""
    )
    if told["split"] is not None and told["split"]["prefill"]:
        yield f"  split     prefilled by {told['split']['prefill']} ({told['split']['reason'].replace('_', ' ')})"
    elif told["split"] is not None:
        yield f"  whole     {told['split']['reason'].replace('_', ' ')}"
    if told["retries"]:
        yield f"  retried   after {', '.join(told['retries'])} failed"


def _outcome(told: Mapping[str, Any]) -> Iterator[str]:
    actual, predicted = told["actual"], told["predicted"]
    if actual["ttft_s"] is not None:
        guess = "" if predicted["ttft_s"] is None else f" (predicted {_ms(predicted['ttft_s'])} from the pick)"
        pace = "" if actual["tpot_s"] is None else f", {_ms(actual['tpot_s'])} a token"
        foreseen = "" if predicted["tpot_s"] is None or not pace else f" (predicted {_ms(predicted['tpot_s'])})"
        yield f"  came      first token after {_ms(actual['ttft_s'])}{guess}{pace}{foreseen}"
    if told["kept"]:
        yield f"  promise   {told['kept'].replace('_', ' ')}"


def _table(pick: Mapping[str, Any]) -> Table:
    """The candidates, best first, with the parts of the score where the policy tells them."""
    rows = pick["candidates"][:MOST_ROWS]
    parts = sorted({name for row in rows for name in row.get("terms", {})})
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("  candidate")
    for name in ("score", "cached", *parts):
        table.add_column(name, justify="right")
    for row in rows:
        mark = "> " if row["endpoint"] == pick["endpoint"] else "  "
        terms = [_number(row.get("terms", {}).get(name)) for name in parts]
        cached = str(row["cached_tokens"]) if "cached_tokens" in row else "-"
        table.add_row(mark + row["endpoint"], _number(row["score"]), cached, *terms)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _of(tenant: str) -> str:
    return f", tenant {tenant}" if tenant else ""

"""The command `penstock explain`, which prints why a request was routed as it was.

A running gateway computes the explanation (GET /explain, telemetry/pick_explanation.py); this
module formats it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any
from urllib.parse import quote

from command_line import Argument, table_lines
from gateway.cli.admin_client import AdminAddress, AdminClient, with_admin_options
from gateway.cli.shared_options import JsonOption
from gateway.cli.terminal_output import exit_with_error, print_json, print_line

NEWEST_REQUEST = "last"
MAX_ROWS = 16


@with_admin_options
def explain(
    admin: AdminAddress,
    request_id: Annotated[
        str,
        Argument(
            metavar="ID",
            help="Id of the request, from the header x-request-id of its response; "
            "default: the newest request.",
        ),
    ] = NEWEST_REQUEST,
    as_json: JsonOption = False,
) -> None:
    """Explain how a request was routed: SLO, candidates with their scores, and outcome."""
    reply = AdminClient(admin, None).request("GET", f"/explain/{quote(request_id, safe='')}")
    if "id" not in reply:
        exit_with_error(f"{request_id}: {reply.get('message', 'not known')}")
    if as_json:
        print_json(reply)
        return
    for line in explanation_lines(reply):
        print_line(line)
    if reply["pick"] is not None:
        for line in _table(reply["pick"]):
            print_line(line)


def explanation_lines(reply: Mapping[str, Any]) -> Iterator[str]:
    """Yield the explanation of one request line by line, without the table of candidates."""
    tenant = _tenant_suffix(reply["tenant"])
    yield f"{reply['id']}: {reply['model']}, {reply['status']} {reply['outcome']}{tenant}"
    if "slo" in reply:
        slo = reply["slo"]
        yield (
            f"  request   {reply['prompt_tokens']} prompt tokens, "
            f"{reply['output_tokens']} output tokens expected"
        )
        limits = (
            f"first token within {slo['ttft_s']:g} s, then {slo['tpot_s'] * 1000:g} ms per token"
        )
        yield f"  SLO       {slo['name']}: {limits}"
    admission = reply["admission"]
    if admission["verdict"] == "admitted":
        waited = (
            f"after {_ms(admission['waited_s'])}" if admission["waited_s"] >= 0.001 else "at once"
        )
        yield f"  admitted  {waited}"
    else:
        yield f"  rejected  {admission['reason'] or ''}: {admission['detail']}"
    if reply["engine_api"] is not None:
        engine_api = reply["engine_api"]
        yield f"  sent as   {engine_api['path']} ({engine_api['reason']})"
    if reply["pick"] is not None:
        yield from _pick_lines(reply)
    yield from _outcome_lines(reply)


def _pick_lines(reply: Mapping[str, Any]) -> Iterator[str]:
    pick = reply["pick"]
    others = len(pick["candidates"])
    yield f"  picked    {pick['endpoint']} of {others} by {pick['policy']}" + (
        f"; next best {pick['runner_up']}" if pick["runner_up"] else ""
    )
    if reply.get("auto"):
        yield f"  policy    chosen in v{reply['auto']['version']}: {reply['auto']['reason']}"
    if reply["split"] is not None and reply["split"]["prefill"]:
        reason = reply["split"]["reason"].replace("_", " ")
        yield f"  split     prefilled by {reply['split']['prefill']} ({reason})"
    elif reply.get("pull"):
        yield f"  pull      {_pull(reply['pull'])}"
    elif reply["split"] is not None:
        yield f"  whole     {reply['split']['reason'].replace('_', ' ')}"
    if reply["retries"]:
        yield f"  retried   after {', '.join(reply['retries'])} failed"


def _pull(pull: Mapping[str, Any]) -> str:
    if not pull["tokens"]:
        return f"nothing came from {pull['source']}, so the prompt was computed"
    offered = "" if pull["offered_s"] is None else f", offered after {_ms(pull['offered_s'])}"
    return f"{pull['tokens']} tokens fetched from {pull['source']}{offered}"


def _outcome_lines(reply: Mapping[str, Any]) -> Iterator[str]:
    actual, predicted = reply["actual"], reply["predicted"]
    if actual["ttft_s"] is not None:
        predicted_ttft = (
            ""
            if predicted["ttft_s"] is None
            else f" (predicted {_ms(predicted['ttft_s'])} at the pick)"
        )
        pace = "" if actual["tpot_s"] is None else f", {_ms(actual['tpot_s'])} per token"
        predicted_tpot = (
            ""
            if predicted["tpot_s"] is None or not pace
            else f" (predicted {_ms(predicted['tpot_s'])})"
        )
        ttft = f"{_ms(actual['ttft_s'])}{predicted_ttft}"
        yield f"  served    first token after {ttft}{pace}{predicted_tpot}"
    if reply["slo_outcome"]:
        yield f"  result    SLO {reply['slo_outcome'].replace('_', ' ')}"


def _table(pick: Mapping[str, Any]) -> Iterator[str]:
    # Return the lines of the table of candidates, best first.
    #
    # The table has a column for each term of the scores, if the policy reports terms.
    rows = pick["candidates"][:MAX_ROWS]
    parts = sorted({name for row in rows for name in row.get("terms", {})})
    cells = []
    for row in rows:
        mark = "> " if row["endpoint"] == pick["endpoint"] else "  "
        terms = [_number(row.get("terms", {}).get(name)) for name in parts]
        cached = str(row["cached_tokens"]) if "cached_tokens" in row else "-"
        cells.append([mark + row["endpoint"], _number(row["score"]), cached, *terms])
    return table_lines(["  candidate", "score", "cached", *parts], cells)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _tenant_suffix(tenant: str) -> str:
    return f", tenant {tenant}" if tenant else ""

"""The newest requests that are over, as rows: GET /requests of the admin server, for the page's list.

Contains: the query, the rows, and the rows of several workers made one list. Not here: which requests are kept, or the
page of one of them (gateway/telemetry/explain.py). Rows have no prompt, no answer and no header of a client.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import islice
from time import monotonic, time
from typing import Any

import msgspec
from aiohttp import web

from gateway.admin.auth import refuse
from gateway.metrics.quantile_sketch import rounded
from gateway.telemetry.explain import Ended, Explained

LIMIT, MOST = 50, 200
SCANNED = 4096
"""Requests that are looked through for those with a problem, newest first: a millisecond of the loop."""

KEPT_WELL = frozenset({"", "met"})


class Query(msgspec.Struct, frozen=True):
    """How many rows, and whether only requests that failed, were refused or missed their SLO."""

    limit: int = LIMIT
    problems: bool = False

    @property
    def path(self) -> str:
        """The same query of a worker."""
        return f"/requests?limit={self.limit}&problems={int(self.problems)}"


def add_requests(routes: web.UrlDispatcher, page: Callable[[Query], Awaitable[dict[str, Any]]]) -> None:
    """GET /requests?limit=N&problems=1, as `page` answers it."""

    async def requests(request: web.Request) -> web.Response:
        try:
            query = read_query(request.query)
        except ValueError as error:
            return refuse(400, str(error))
        return web.json_response(await page(query))

    routes.add_get("/requests", requests)


def read_query(fields: Mapping[str, str]) -> Query:
    """Raises ValueError."""
    limit, problems = fields.get("limit", str(LIMIT)), fields.get("problems", "0")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 5 and 1 <= int(limit) <= MOST):
        raise ValueError(f"limit is a number from 1 to {MOST}")
    if problems not in ("0", "1"):
        raise ValueError("problems is 0 or 1")
    return Query(int(limit), problems == "1")


def recent(explained: Explained, query: Query) -> dict[str, Any]:
    """The newest requests first. `size` is how many the gateway keeps (observability.explained)."""
    newest: Iterable[Ended] = islice(explained.newest_first(), SCANNED)
    if query.problems:
        newest = (ended for ended in newest if has_problem(ended))
    zero = time() - monotonic()
    return {"size": explained.size, "requests": [_row(ended, zero) for ended in islice(newest, query.limit)]}


def has_problem(ended: Ended) -> bool:
    """Not served to its end, or served outside its SLO."""
    return ended[0].outcome != "served" or ended[0].kept not in KEPT_WELL


def together(pages: Iterable[Mapping[str, Any]], query: Query) -> dict[str, Any]:
    """The lists of several workers as one."""
    told = list(pages)
    rows = sorted((row for page in told for row in page["requests"]), key=_ended_at, reverse=True)
    return {"size": sum(page["size"] for page in told), "requests": rows[: query.limit]}


def _ended_at(row: Mapping[str, Any]) -> float:
    at: float = row["at"] + row["took_s"]
    return at


def _row(ended: Ended, zero: float) -> dict[str, Any]:
    """`at` is when the request began, in Unix time; what is not known is null."""
    x, usage, events, over_at = ended
    request = None if x.call is None else x.call.request
    return {
        "id": x.id,
        "proxy_request_id": x.proxy_request_id or None,
        "trace_id": None if x.trace is None else x.trace.trace_id,
        "at": round(zero + x.accepted_at, 3),
        "took_s": round(over_at - x.accepted_at, 4),
        "tenant": x.tenant or None,
        "model": x.model or None,
        "endpoint": None if x.pick is None else x.pick.candidate.endpoint.name,
        "prefill": None if x.split is None else x.split.prefill or None,
        "retries": list(x.retries),
        "status": x.status,
        "outcome": x.outcome,
        "reason": x.reason,
        "slo": None if request is None else request.slo.name,
        "slo_outcome": x.kept or None,
        "problem": has_problem(ended),
        "ttft_s": rounded(x.ttft_s),
        "tpot_s": rounded(x.tpot_s),
        "prompt_tokens": usage.prompt_tokens or (None if request is None else request.prompt_tokens),
        "cached_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens or (max(events - 2, 1) if events else None),
    }

"""The admin page GET /requests: a table of the requests that ended most recently.

This module has the query, the rows, and the merge of several workers' rows. A row contains no
prompt, response text or client header. telemetry/recent_requests.py keeps the requests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import islice
from time import monotonic, time
from typing import Any

import msgspec
from aiohttp import web

from gateway.admin.security import error_response
from gateway.metrics.quantile_sketch import round_seconds
from gateway.telemetry.recent_requests import EndedExchange, RecentExchanges, has_problem

DEFAULT_LIMIT, MAX_LIMIT = 50, 200
MAX_SCANNED = 4096
"""Maximum number of finished requests that are searched for problems, newest first.

The search blocks the event loop, for this many about 1 ms."""


class RecentQuery(msgspec.Struct, frozen=True):
    """The query of GET /requests: how many rows to return, and whether only those with problems.

    A request has a problem if it failed, was rejected, or missed its latency target (SLO).
    """

    limit: int = DEFAULT_LIMIT
    problems: bool = False

    @property
    def path(self) -> str:
        return f"/requests?limit={self.limit}&problems={int(self.problems)}"


def add_requests(
    routes: web.UrlDispatcher, page: Callable[[RecentQuery], Awaitable[dict[str, Any]]]
) -> None:
    """Add the route GET /requests?limit=N&problems=1 to the admin server; `page` is its handler."""

    async def requests(request: web.Request) -> web.Response:
        try:
            query = read_query(request.query)
        except ValueError as error:
            return error_response(400, str(error))
        return web.json_response(await page(query))

    routes.add_get("/requests", requests)


def read_query(fields: Mapping[str, str]) -> RecentQuery:
    """Parse the query string of GET /requests.

    Raises ValueError with a message that says which values are valid.
    """
    limit, problems = fields.get("limit", str(DEFAULT_LIMIT)), fields.get("problems", "0")
    if not (
        limit.isascii() and limit.isdigit() and len(limit) < 5 and 1 <= int(limit) <= MAX_LIMIT
    ):
        raise ValueError(f"the query parameter limit must be a number from 1 to {MAX_LIMIT}")
    if problems not in ("0", "1"):
        raise ValueError("the query parameter problems must be 0 or 1")
    return RecentQuery(int(limit), problems == "1")


def recent_rows(explained: RecentExchanges, query: RecentQuery) -> dict[str, Any]:
    """Return the requests that ended most recently, as the page GET /requests shows them.

    The result has the rows, newest first, as `requests`. `size` is the number of requests that the
    gateway keeps in memory (setting observability.explained).
    """
    newest: Iterable[EndedExchange] = islice(explained.newest_first(), MAX_SCANNED)
    if query.problems:
        newest = (ended for ended in newest if has_problem(ended[0]))
    epoch = time() - monotonic()
    return {
        "size": explained.size,
        "requests": [_row(ended, epoch) for ended in islice(newest, query.limit)],
    }


def merge_recent(pages: Iterable[Mapping[str, Any]], query: RecentQuery) -> dict[str, Any]:
    """Merge several workers' rows into one list, newest first, with at most the query's limit."""
    rows_by_worker = list(pages)
    rows = sorted(
        (row for page in rows_by_worker for row in page["requests"]), key=_ended_at, reverse=True
    )
    return {"size": sum(page["size"] for page in rows_by_worker), "requests": rows[: query.limit]}


def _ended_at(row: Mapping[str, Any]) -> float:
    at: float = row["at"] + row["took_s"]
    return at


def _row(ended: EndedExchange, epoch: float) -> dict[str, Any]:
    # Return one row; `at` is the request's start in Unix time, and unknown values are None.
    exchange, usage, events, ended_at = ended
    request = None if exchange.call is None else exchange.call.request
    return {
        "id": exchange.id,
        "proxy_request_id": exchange.proxy_request_id or None,
        "trace_id": None if exchange.trace is None else exchange.trace.trace_id,
        "at": round(epoch + exchange.accepted_at, 3),
        "took_s": round(ended_at - exchange.accepted_at, 4),
        "tenant": exchange.tenant or None,
        "model": exchange.model or None,
        "endpoint": None if exchange.pick is None else exchange.pick.candidate.endpoint.name,
        "prefill": None if exchange.split is None else exchange.split.prefill or None,
        "retries": list(exchange.retries),
        "status": exchange.status,
        "outcome": exchange.outcome,
        "reason": exchange.reason,
        "slo": None if request is None else request.slo.name,
        "slo_outcome": exchange.slo_outcome or None,
        "problem": has_problem(exchange),
        "ttft_s": round_seconds(exchange.ttft_s),
        "tpot_s": round_seconds(exchange.tpot_s),
        "prompt_tokens": usage.prompt_tokens
        or (None if request is None else request.prompt_tokens),
        "cached_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens or (max(events - 2, 1) if events else None),
    }

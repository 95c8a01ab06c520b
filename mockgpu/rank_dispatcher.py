"""Dispatches requests to the data-parallel ranks of one mock engine.

Each rank has its own scheduler, KV blocks and KV events, but all ranks share one port. The header
x-data-parallel-rank of a request selects the rank, as in vLLM and SGLang. Without it, the engine
chooses the rank (rank_balancer.py).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

from mockgpu.engine_formats import EngineFormat
from mockgpu.http.handler_helpers import json_answer
from mockgpu.http.server import Handler, MockServer
from mockgpu.rank_balancer import RankBalancer
from mockgpu.request_parser import ApiError
from mockgpu.tp_group import TpGroup

RANK_HEADER = "x-data-parallel-rank"
_COMPUTING = frozenset(("chat", "completions", "converse", "pool", "listen"))
"""Methods of GenerationHandlers, whose work is done by one rank."""


class RankDispatcher:
    """Dispatches the requests of one engine to the HTTP servers of its data-parallel ranks."""

    def __init__(self, servers: Sequence[MockServer]) -> None:
        # servers  the ranks' servers, in order of the ranks; the first one owns the port
        self._servers = servers
        self._balancer = RankBalancer(len(servers))
        self._of_all = {
            "metrics": self._metrics,
            "sources": self._sources,
            "blocks": self._blocks,
        }

    @web.middleware
    async def dispatch(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        name = request.match_info.handler.__name__
        if name in self._of_all:
            return self._of_all[name](request)
        if name not in _COMPUTING:
            return await handler(request)
        server = self._pick(request)
        headers = CIMultiDict(request.headers)
        headers.popall(RANK_HEADER, None)  # a server is one rank and refuses the others
        answer: web.StreamResponse = await getattr(server.generation, name)(
            request.clone(headers=headers)
        )
        return answer

    def _pick(self, request: web.Request) -> MockServer:
        # Return the server of a request. Raises ApiError 400 for a rank that does not exist.
        text, count = request.headers.get(RANK_HEADER, ""), len(self._servers)
        if not re.fullmatch("-?[0-9]+", text):  # vLLM ignores what is not an integer
            now = asyncio.get_running_loop().time()
            return self._servers[self._balancer.pick(now, self._counts)]
        if len(text) > 9 or not 0 <= int(text) < count:
            problem = f"data_parallel_rank {text} is out of range [0, {count})."
            raise ApiError(400, problem, "data_parallel_rank")
        return self._servers[int(text)]

    def _counts(self) -> list[tuple[int, int]]:
        return [(group.queued, group.scheduler.running) for group in self._groups()]

    def _groups(self) -> list[TpGroup]:
        return [server.group for server in self._servers]

    def _metrics(self, _: web.Request) -> web.Response:
        pages = [
            group.metrics.render(group.scheduler, None, EngineFormat.VLLM)
            for group in self._groups()
        ]
        return web.Response(text="".join(pages), content_type="text/plain")

    def _sources(self, _: web.Request) -> web.Response:
        # Return the publishers of all ranks, as vLLM does at /kv_event_sources.
        described: dict[str, Any] = {}
        for rank, group in enumerate(self._groups()):
            if group.kv_events is not None:
                described[str(rank)] = group.kv_events.describe()
        return json_answer(described)

    def _blocks(self, _: web.Request) -> web.Response:
        ranks = [
            {"hashes": events.hashes(), "number": events.stream.next_number}
            for group in self._groups()
            if (events := group.kv_events) is not None
        ]
        return json_answer({"ranks": ranks})

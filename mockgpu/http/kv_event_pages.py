"""HTTP routes of a mock engine that describe its publisher of KV events, and list its cached
blocks.
"""

from __future__ import annotations

from aiohttp import web

from mockgpu.engine_formats import EngineFormat
from mockgpu.group import TpGroup
from mockgpu.http.handler_helpers import json_answer
from mockgpu.request_parser import ApiError


class KvEventPages:
    """The KV event routes of one mock engine, in the format of the engine that it imitates."""

    def __init__(self, group: TpGroup, engine: EngineFormat) -> None:
        self._group, self._engine = group, engine

    def engine_routes(self) -> list[web.RouteDef]:
        """Return the routes by which the imitated engine describes its KV event publisher."""
        if self._engine is EngineFormat.SGLANG:
            return [web.get("/server_info", self.server_info)]
        if self._engine is EngineFormat.VLLM:
            return [web.get("/kv_event_sources", self.sources)]
        return []

    async def sources(self, _: web.Request) -> web.Response:
        """Serve vLLM's GET /kv_event_sources: the publishers by data-parallel rank."""
        events = self._group.kv_events
        return json_answer({} if events is None else {"0": events.describe()})

    async def server_info(self, _: web.Request) -> web.Response:
        """Serve SGLang's GET /server_info, with only the fields about KV events."""
        events = self._group.kv_events
        return json_answer({} if events is None else {"kv_events": events.describe_as_sglang()})

    async def blocks(self, _: web.Request) -> web.Response:
        """Serve GET /mock/kv_blocks: the hashes of all cached blocks, and the next event number."""
        events = self._group.kv_events
        if events is None:
            raise ApiError(404, "The group publishes no KV events.")
        return json_answer({"hashes": events.hashes(), "number": events.stream.next_number})

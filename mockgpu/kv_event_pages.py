"""The HTTP routes that name a group's publisher of KV events, and list what it has cached."""

from __future__ import annotations

from aiohttp import web

from mockgpu.engine_formats import EngineFormat
from mockgpu.group import TpGroup
from mockgpu.http_answers import json_answer
from mockgpu.request_parser import ApiError


class KvEventPages:
    """The routes of one group, in the form of the engine that it imitates."""

    def __init__(self, group: TpGroup, engine: EngineFormat) -> None:
        self._group, self._engine = group, engine

    def engine_routes(self) -> list[web.RouteDef]:
        """Return the route by which the imitated engine describes its publisher."""
        if self._engine is EngineFormat.SGLANG:
            return [web.get("/server_info", self.server_info)]
        if self._engine is EngineFormat.VLLM:
            return [web.get("/kv_event_sources", self.sources)]
        return []

    async def sources(self, _: web.Request) -> web.Response:
        """GET /kv_event_sources of vLLM: publishers by data-parallel rank."""
        events = self._group.kv_events
        return json_answer({} if events is None else {"0": events.describe()})

    async def server_info(self, _: web.Request) -> web.Response:
        """GET /server_info of SGLang, with the publisher of KV events only."""
        events = self._group.kv_events
        return json_answer({} if events is None else {"kv_events": events.describe_as_sglang()})

    async def blocks(self, _: web.Request) -> web.Response:
        """GET /mock/kv_blocks: the cached blocks by the events' hashes, and the next number."""
        events = self._group.kv_events
        if events is None:
            raise ApiError(404, "The group publishes no KV events.")
        return json_answer({"hashes": events.hashes(), "number": events.stream.next_number})

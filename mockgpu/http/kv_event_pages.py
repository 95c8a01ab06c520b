"""HTTP routes of a mock engine that say where its KV events are published and what is cached.

KV events are messages that report which blocks enter and leave the engine's prefix cache.
"""

from __future__ import annotations

from aiohttp import web

from mockgpu.engine_formats import EngineFormat
from mockgpu.http.handler_helpers import json_answer
from mockgpu.request_parser import ApiError
from mockgpu.tp_group import TpGroup


class KvEventPages:
    """HTTP routes about one mock engine's KV events, in the format of the engine that it imitates.

    KV events are messages that report which blocks enter and leave the engine's prefix cache.
    """

    def __init__(self, group: TpGroup, engine: EngineFormat) -> None:
        self._group, self._engine = group, engine

    def engine_routes(self) -> list[web.RouteDef]:
        """Return the routes that the imitated engine has to describe where it publishes KV events.

        The list is empty for an engine that has no such route.
        """
        if self._engine is EngineFormat.SGLANG:
            return [web.get("/server_info", self.server_info)]
        if self._engine is EngineFormat.VLLM:
            return [web.get("/kv_event_sources", self.sources)]
        return []

    async def sources(self, _: web.Request) -> web.Response:
        """Serve GET /kv_event_sources, as vLLM does: where each rank publishes its KV events."""
        events = self._group.kv_events
        return json_answer({} if events is None else {"0": events.describe()})

    async def server_info(self, _: web.Request) -> web.Response:
        """Serve GET /server_info, as SGLang does, but only the fields about KV events."""
        events = self._group.kv_events
        return json_answer({} if events is None else {"kv_events": events.describe_as_sglang()})

    async def blocks(self, _: web.Request) -> web.Response:
        """Serve GET /mock/kv_blocks: the hashes of all cached blocks, and the next event's
        number.
        """
        events = self._group.kv_events
        if events is None:
            raise ApiError(
                404, "This engine publishes no KV events; start it with --kv-events-port."
            )
        return json_answer({"hashes": events.hashes(), "number": events.stream.next_number})

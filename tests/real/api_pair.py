"""Runs a real engine and a gateway in front of it, to compare their answers to the same
requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import GatewayProcess
from tests.real.engines import MODEL, REAL, Engine, free_ports
from tests.real.gateway_process import gateway
from tests.real.replies import Reply, send, unlike

NAME = "an-alias"
CONFIG = """
models: [{{name: an-alias, served_model: tiny, pool: main}}]
pools: {{main: {{endpoints: [{{url: '{0}', max_concurrency: 8}}]}}}}
health: {{timeout: 5s, progress: 60s, interval: 500ms}}
scrape: {{timeout: 5s, interval: 500ms}}
"""
Call = tuple[str, dict[str, Any]]


class Pair:
    """A real engine and a gateway in front of it, which get the same requests."""

    def __init__(self, engine: Engine, front: GatewayProcess) -> None:
        self.engine, self.front = engine, front

    async def both(self, path: str, body: dict[str, Any]) -> tuple[Reply, Reply]:
        """Send a request to the gateway and to the engine; return both answers in this order.

        The engine, which is behind the gateway, has answered the request before, so that its cache
        contains the prompt both times.
        """
        await send(self.engine.url, path, {"model": MODEL, **body})
        own = await send(self.engine.url, path, {"model": MODEL, **body})
        return await send(self.front.url, path, {"model": NAME, **body}), own

    async def assert_equal(self, path: str, body: dict[str, Any]) -> Reply:
        reply, own = await self.both(path, body)
        assert own.status == 200, own.body
        assert unlike(reply, own, (NAME, MODEL)) == []
        return reply

    async def assert_refused(self, path: str, body: dict[str, Any]) -> None:
        reply, own = await self.both(path, body)
        assert 400 <= own.status < 500, own
        assert (reply.status, reply.message) == (own.status, own.message)


@contextmanager
def engine_and_gateway(folder: Path, model: str, *options: str) -> Iterator[Pair]:
    """Run a real engine and a gateway in front of it, during a `with` block.

    The engine has no KV connector.
    """
    if not (REAL / "installed").exists():
        pytest.fail("the real engines are not installed; `make real` does it")
    env = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    ports = free_ports(2)
    engine = Engine(
        *(f"apis-{Path(model).name}", *ports, 1, None), options=options, model=model, env=env
    )
    engine.start()
    try:
        asyncio.run(engine.ready())
        with gateway(folder, CONFIG.format(engine.url)) as front:
            yield Pair(engine, front)
            assert front.is_alive
    finally:
        engine.kill()

"""Bootstrap servers of prefill groups, and how decode groups ask them for the agent: Mooncake's and SGLang's pages.

Source: engines.md B.4 (`GET /query`), D (`GET /route`, 503 until ready, `/health`).
"""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from mockgpu.blocks import BLOCK_TOKENS
from mockgpu.handoff.contract import Here, joined
from mockgpu.handoff.desk import UnknownPeerError
from mockgpu.handoff.legs import Asked, At, Take

PAGES = {"mooncake": "/query", "sglang": "/route"}
ROUTE_QUERY = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
ASKING_S = 5.0


class Bootstrap:
    """One prefill group's bootstrap server, on a port of its own that it keeps when it comes back."""

    def __init__(self, host: str, port: int, dialect: str, tp: int) -> None:
        self.wanted = dialect in PAGES
        self.url = ""
        self._host, self._port, self._dialect, self._tp = host, port, dialect, tp
        self._runner: web.AppRunner | None = None
        self._here: Here | None = None

    async def start(self, here: Here) -> None:
        """Tell who we are now. OSError when the port is taken."""
        self._here = here
        app = web.Application()
        app.add_routes(
            [web.get(PAGES[self._dialect], self._page), web.get("/health", self._health)]
        )
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://{self._host}:{self._port}"

    async def stop(self) -> None:
        """Nobody answers any more."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _page(self, _: web.Request) -> web.Response:
        if self._here is None:
            return web.Response(status=503)
        body = _query(self._here) if self._dialect == "mooncake" else _route(self._here)
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="OK")


def _query(here: Here) -> dict[str, Any]:
    """Mooncake's page: by data-parallel rank, the engine and its workers' addresses by tensor and pipeline rank."""
    workers = {str(rank): {"0": here.address} for rank in range(here.tp)}
    return {"0": {"engine_id": here.engine_id, "worker_addr": workers}}


def _route(here: Here) -> dict[str, Any]:
    """SGLang's page: how prefill is parallel, and where this rank's KV manager listens."""
    return {
        "attn_tp_size": here.tp,
        "attn_cp_size": 1,
        "dp_size": 1,
        "pp_size": 1,
        "page_size": BLOCK_TOKENS,
        "kv_cache_dtype": "auto",
        "follow_bootstrap_room": True,
        "rank_ip": here.host,
        "rank_port": here.port,
    }


class Resolver:
    """Where the group that has the KV is reached. Remembers what it was told until `forget()`."""

    def __init__(self) -> None:
        self._http: aiohttp.ClientSession | None = None
        self._known: dict[Asked, str] = {}

    async def address(self, take: Take) -> str:
        """The agent's address. UnknownPeerError when nobody tells, or the engine asked for is gone."""
        if isinstance(take.peer, At):
            return take.peer.address
        if take.peer not in self._known:
            self._known[take.peer] = await self._ask(take.peer)
        return self._known[take.peer]

    def forget(self, take: Take) -> None:
        """What was told of this peer is no longer so."""
        if isinstance(take.peer, Asked):
            self._known.pop(take.peer, None)

    async def renew(self, take: Take) -> str | None:
        """Ask the giver to keep it for longer: the ticket that serves from now on. None: it is too late."""
        body = msgspec.json.encode({"name": take.name, "ticket": take.ticket})
        try:
            async with self._session().post(take.renew, data=body) as response:
                told = msgspec.json.decode(await response.read(), type=dict[str, Any])
                return str(told["ticket"]) if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, ValueError, KeyError):
            return None

    async def close(self) -> None:
        """Close the client."""
        if self._http is not None:
            await self._http.close()

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASKING_S))
        return self._http

    async def _ask(self, peer: Asked) -> str:
        mooncake = peer.engine_id is not None
        url = f"{peer.bootstrap}/query" if mooncake else f"{peer.bootstrap}/route?{ROUTE_QUERY}"
        try:
            async with self._session().get(url) as response:
                page = msgspec.json.decode(await response.read(), type=dict[str, Any])
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, ValueError) as error:
            raise UnknownPeerError(f"{url}: {error}") from error
        try:
            if not mooncake:
                return joined(str(page["rank_ip"]), int(page["rank_port"]))
            workers = next(
                rank["worker_addr"] for rank in page.values() if rank["engine_id"] == peer.engine_id
            )
            return str(workers["0"]["0"])
        except (KeyError, TypeError, StopIteration, ValueError) as error:
            raise UnknownPeerError(f"{url} knows no engine {peer.engine_id}") from error

"""Bootstrap servers and their client: how a decode engine finds the address of a prefill engine.

- Mooncake's bootstrap server answers `GET /query`.
- SGLang's bootstrap server answers `GET /route` (503 until it is ready) and `GET /health`.

Sources: MooncakeConnector of vLLM 0.33, SGLang 0.5.23.
"""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from mockgpu.handoff.interfaces import EngineIdentity, agent_address
from mockgpu.handoff.kv_handoff import UnknownPeerError
from mockgpu.paged_kv_cache import BLOCK_TOKENS
from mockgpu.split_legs import AgentPeer, BootstrapPeer, DecodeLeg

PAGES = {"mooncake": "/query", "sglang": "/route"}
ROUTE_QUERY = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
QUERY_S = 5.0


class BootstrapServer:
    """The server at which decode engines ask for the address of one prefill engine.

    If it is restarted, it listens on the same port again.

    is_needed  whether the engine's protocol uses such a server
    url        URL of the running server; "" before the first start
    """

    def __init__(self, host: str, port: int, dialect: str, tp: int) -> None:
        self.is_needed = dialect in PAGES
        self.url = ""
        self._host, self._port, self._dialect, self._tp = host, port, dialect, tp
        self._runner: web.AppRunner | None = None
        self._identity: EngineIdentity | None = None

    async def start(self, identity: EngineIdentity) -> None:
        """Start the server, which publishes this identity. Raises OSError if the port is in use."""
        self._identity = identity
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
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _page(self, _: web.Request) -> web.Response:
        if self._identity is None:
            return web.Response(status=503)
        body = _query(self._identity) if self._dialect == "mooncake" else _route(self._identity)
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="OK")


def _query(identity: EngineIdentity) -> dict[str, Any]:
    # Return Mooncake's /query response: engine and worker addresses by data-parallel rank.
    workers = {str(rank): {"0": identity.address} for rank in range(identity.tp)}
    return {"0": {"engine_id": identity.engine_id, "worker_addr": workers}}


def _route(identity: EngineIdentity) -> dict[str, Any]:
    # Return SGLang's /route response: the parallelism, and this rank's KV manager address.
    return {
        "attn_tp_size": identity.tp,
        "attn_cp_size": 1,
        "dp_size": 1,
        "pp_size": 1,
        "page_size": BLOCK_TOKENS,
        "kv_cache_dtype": "auto",
        "follow_bootstrap_room": True,
        "rank_ip": identity.host,
        "rank_port": identity.port,
    }


class PeerResolver:
    """Finds out where a prefill engine's KV transfer agent listens, and remembers it.

    The KV transfer agent is the part of an engine that sends and receives KV.
    """

    def __init__(self) -> None:
        self._http: aiohttp.ClientSession | None = None
        self._addresses: dict[BootstrapPeer, str] = {}

    async def address(self, leg: DecodeLeg) -> str:
        """Return the address from which to fetch the KV of a split request.

        It is that of the prefill engine's KV transfer agent. Raises UnknownPeerError if it cannot
        be found.
        """
        if isinstance(leg.peer, AgentPeer):
            return leg.peer.address
        if leg.peer not in self._addresses:
            self._addresses[leg.peer] = await self._query_bootstrap(leg.peer)
        return self._addresses[leg.peer]

    def forget(self, leg: DecodeLeg) -> None:
        if isinstance(leg.peer, BootstrapPeer):
            self._addresses.pop(leg.peer, None)

    async def renew(self, leg: DecodeLeg) -> str | None:
        """Ask the prefill engine to keep the KV of a split request longer.

        Returns the new ticket (the permission to fetch the KV), or None if the KV is already freed.
        """
        body = msgspec.json.encode({"name": leg.name, "ticket": leg.ticket})
        try:
            async with self._session().post(leg.renew, data=body) as response:
                reply = msgspec.json.decode(await response.read(), type=dict[str, Any])
                return str(reply["ticket"]) if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, ValueError, KeyError):
            return None

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=QUERY_S))
        return self._http

    async def _query_bootstrap(self, peer: BootstrapPeer) -> str:
        mooncake = peer.engine_id is not None
        url = f"{peer.bootstrap}/query" if mooncake else f"{peer.bootstrap}/route?{ROUTE_QUERY}"
        try:
            async with self._session().get(url) as response:
                page = msgspec.json.decode(await response.read(), type=dict[str, Any])
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, ValueError) as error:
            raise UnknownPeerError(f"{url}: {error}") from error
        try:
            if not mooncake:
                return agent_address(str(page["rank_ip"]), int(page["rank_port"]))
            workers = next(
                rank["worker_addr"] for rank in page.values() if rank["engine_id"] == peer.engine_id
            )
            return str(workers["0"]["0"])
        except (KeyError, TypeError, StopIteration, ValueError) as error:
            raise UnknownPeerError(
                f"the bootstrap server {url} does not know the engine id {peer.engine_id}"
            ) from error

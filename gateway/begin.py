"""Where an exchange begins: its id, its first stamp, its place in a trace. serve.py has the rest of the line."""

from __future__ import annotations

import secrets
from collections.abc import Coroutine
from time import monotonic
from typing import Any

import xxhash

from gateway.client import Client
from gateway.exchange import Exchange
from gateway.forwarded import TrustedProxies, proxy_request_id
from gateway.meters import Histogram
from gateway.openai import Api
from gateway.serve import Gateway, serve

GAPS_EVERY = 32  # one request in so many has the times between its pieces looked at


class Beginning:
    """Begins exchanges, one per process. Ids have a fixed length and are unguessable: an engine may match aborts by
    their prefix (faults.md F21). 0.4 us each."""

    __slots__ = ("_count", "_gaps", "_gateway", "_proxies", "_secret")

    def __init__(self, gateway: Gateway, gaps: Histogram, proxies: TrustedProxies | None = None) -> None:
        """`gaps`: where the times between a stream's pieces are counted. `proxies` may name the client they serve."""
        self._proxies = proxies
        self._gateway = gateway
        self._gaps = gaps
        self._secret = secrets.token_bytes(16)
        self._count = 0

    def serve(self, client: Client, api: Api) -> Coroutine[Any, Any, None]:
        """One request, as soon as its head is there."""
        self._count = count = self._count + 1
        request_id = "req_" + xxhash.xxh3_128_hexdigest(self._secret + count.to_bytes(8, "little"))
        x = Exchange(request_id, api, client.address, monotonic())
        proxies = self._proxies
        if proxies is not None and proxies.is_proxy(client.address):
            x.client = proxies.client_address(client.headers, client.address)
            x.proxy_request_id = proxy_request_id(client.headers)
        gateway = self._gateway
        tracer = gateway.accounts.tracer
        if tracer is not None:
            x.trace = tracer.begin(client.headers)
        if not count % GAPS_EVERY:
            x.gaps = self._gaps
        return serve(gateway, x, client)

"""Endpoints by Kubernetes: the ready addresses of a Service's EndpointSlices, listed once and then watched.

Over the API server's HTTP with the service account that is mounted into the pod, which needs `list` and `watch` on
endpointslices. A watch that ends goes on from where it was; one that came too late (410), or failed twice without a
word, begins with a list again.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import msgspec

from gateway.config.discover import Kubernetes
from gateway.config.tree import EndpointTraits
from gateway.discovery.source import Found, log, specs

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
ANSWER_BYTES, LINE_BYTES = 32 << 20, 4 << 20
WATCH_S = 300.0  # the API server ends a watch then; one that it does not end is dead
FIRST_S, LONGEST_S = 0.5, 30.0  # between two tries
GONE = 410
FAILURES = 2  # in a row without a word: whatever is wrong may be the version, as of an API server that was restored


class Expired(Exception):
    """The API server does not know any more what happened since."""


class Account(msgspec.Struct, frozen=True):
    """Where the API server is, and who asks. The token is read anew for every request: it is rotated."""

    url: str
    folder: Path = ACCOUNT

    def headers(self) -> dict[str, str]:
        try:
            token = (self.folder / "token").read_text().strip()
        except OSError:
            return {}
        return {"Authorization": f"Bearer {token}"}

    def tls(self) -> ssl.SSLContext | bool:
        authority = self.folder / "ca.crt"
        return ssl.create_default_context(cafile=str(authority)) if authority.exists() else True

    def namespace(self) -> str:
        try:
            return (self.folder / "namespace").read_text().strip()
        except OSError:
            return "default"


def mounted() -> Account:
    """The one of the pod that this process runs in."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return Account(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}")


class Slices:
    """The EndpointSlices of one Service."""

    def __init__(
        self,
        where: Kubernetes,
        traits: EndpointTraits,
        rng: Random,
        account: Account,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._where, self._traits, self._rng, self._account, self._sleep = where, traits, rng, account, sleep
        self._slices: dict[str, dict[str, Any]] = {}
        self._version = ""
        self._wait_s = FIRST_S
        self._failing = False

    async def watch(self) -> AsyncIterator[Found]:
        said: Found | None = None
        failures = 0
        tls = await asyncio.to_thread(self._account.tls)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=WATCH_S + 30)
        connector = aiohttp.TCPConnector(ssl=tls)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=LINE_BYTES) as http:
            while True:
                heard = False
                try:
                    if not self._version:
                        await self._list(http)
                        found = self._found()
                        if found != said:
                            said = found
                            yield found
                    async for _ in self._events(http):
                        heard = True
                        found = self._found()
                        if found != said:
                            said = found
                            yield found
                except Expired:
                    self._version = ""
                except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                    self._failed(error, heard=heard)
                    failures = 0 if heard else failures + 1
                    if failures == FAILURES:
                        self._version, failures = "", 0
                else:
                    self._failing, failures = False, 0
                if not heard:  # else it ended as watches do, and goes on from there
                    await self._sleep(self._wait_s * self._rng.uniform(0.5, 1.0))
                    self._wait_s = min(LONGEST_S, 2 * self._wait_s)

    def _failed(self, error: Exception, *, heard: bool) -> None:
        """One line until it is heard again, or a watch has ended as watches do: tries go on for ever."""
        if heard or not self._failing:
            log.warning("EndpointSlices of %s: %s; whom they last named stay", self._where.service, error)
        self._failing = True

    def _at(self) -> tuple[str, dict[str, str]]:
        space = self._where.namespace or self._account.namespace()
        url = f"{self._account.url}/apis/discovery.k8s.io/v1/namespaces/{space}/endpointslices"
        return url, {"labelSelector": f"kubernetes.io/service-name={self._where.service}"}

    async def _list(self, http: aiohttp.ClientSession) -> None:
        url, wanted = self._at()
        async with http.get(url, params=wanted, headers=self._account.headers()) as answer:
            _checked(answer)
            text = await answer.content.read(ANSWER_BYTES)
            while not answer.content.at_eof():
                if len(text) >= ANSWER_BYTES:
                    raise ValueError(f"a list of more than {ANSWER_BYTES} bytes")
                text += await answer.content.read(ANSWER_BYTES)
        told = json.loads(text)
        self._slices = {each["metadata"]["name"]: each for each in told.get("items") or ()}
        self._version = told["metadata"]["resourceVersion"]

    async def _events(self, http: aiohttp.ClientSession) -> AsyncIterator[None]:
        """Follows what changes from the known version on; yields when something has."""
        url, wanted = self._at()
        wanted |= {"watch": "1", "allowWatchBookmarks": "true", "resourceVersion": self._version}
        wanted["timeoutSeconds"] = str(int(WATCH_S))
        async with http.get(url, params=wanted, headers=self._account.headers()) as answer:
            _checked(answer)
            while line := await answer.content.readline():
                if line.strip():
                    self._take(json.loads(line))
                    self._wait_s = FIRST_S
                    yield

    def _take(self, event: dict[str, Any]) -> None:
        kind, told = event["type"], event["object"]
        if kind == "ERROR":
            if told.get("code") == GONE:
                raise Expired
            raise ValueError(f"the watch was ended with {told.get('code')}")
        name = told["metadata"].get("name", "")
        if kind == "DELETED":
            self._slices.pop(name, None)
        elif kind in ("ADDED", "MODIFIED"):
            self._slices[name] = told
        self._version = told["metadata"]["resourceVersion"]

    def _found(self) -> Found:
        kinds = {each.get("addressType") for each in self._slices.values()}
        twice = "IPv4" if {"IPv4", "IPv6"} <= kinds else None  # every pod of a service with both has one of each
        addresses = [
            (address, port)
            for each in self._slices.values()
            if twice is None or each.get("addressType") == twice
            if (port := self._port(each)) is not None
            for endpoint in each.get("endpoints") or ()
            if (endpoint.get("conditions") or {}).get("ready") is not False
            for address in endpoint.get("addresses") or ()
        ]
        return specs(addresses, self._traits)

    def _port(self, told: dict[str, Any]) -> int | None:
        """The port of a slice by the wanted name or number; the first one unless one is wanted."""
        ports = [each for each in told.get("ports") or () if each.get("port")]
        wanted = self._where.port
        fitting = [each for each in ports if wanted is None or wanted in (each.get("name"), str(each["port"]))]
        return int(fitting[0]["port"]) if fitting else None


def _checked(answer: aiohttp.ClientResponse) -> None:
    if answer.status == GONE:
        raise Expired
    if answer.status != 200:
        raise ValueError(f"the API server answers {answer.status}")

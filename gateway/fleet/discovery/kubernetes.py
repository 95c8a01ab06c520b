"""Discovery by Kubernetes: lists the EndpointSlices of a Service, then watches them for changes.

It calls the HTTP API of Kubernetes with the pod's service account, which needs the permissions
`list` and `watch` for endpointslices. When a watch ends, the next one continues at the last version
seen. The slices are listed again in two cases:

- The response is 410: the API server no longer has all changes since that version.
- Two watches in a row have failed without an event.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import msgspec

from gateway.config.discovery_sections import Kubernetes
from gateway.config.endpoint_sections import EndpointTraits
from gateway.fleet.discovery.source_interface import DiscoveredEndpoints, log, specs_for
from gateway.util.work_in_turns import run_in_thread

ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
LIST_CAP_BYTES, LINE_CAP_BYTES = 32 << 20, 4 << 20
# The API server ends a watch after this; one that lasts longer is a dead connection.
WATCH_S = 300.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # pauses between attempts
STATUS_GONE = 410

# After this number of failures in a row, the version itself may be invalid, for example
# after an API server was restored from a backup.
FAILURES_BEFORE_RELIST = 2


class VersionExpiredError(Exception):
    """Raised when the API server no longer has the changes since a watch's last version."""


class ServiceAccount(msgspec.Struct, frozen=True):
    """The address of the Kubernetes API server, and the folder of the pod's service account.

    The folder contains the account's token and the server's certificate. The token is read for
    every request, because Kubernetes rotates it.
    """

    url: str
    folder: Path = ACCOUNT_FOLDER

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


def pod_service_account() -> ServiceAccount:
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return ServiceAccount(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}")


class KubernetesSource:
    """A discovery source that watches the EndpointSlices of one Kubernetes Service."""

    def __init__(
        self,
        where: Kubernetes,
        traits: EndpointTraits,
        rng: Random,
        account: ServiceAccount,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._spec, self._traits, self._rng = where, traits, rng
        self._account, self._sleep = account, sleep
        self._slices: dict[str, dict[str, Any]] = {}
        self._version = ""
        self._wait_s = FIRST_PAUSE_S
        self._is_failing = False

    async def watch(self) -> AsyncIterator[DiscoveredEndpoints]:
        yielded: DiscoveredEndpoints | None = None
        failures = 0
        tls = await asyncio.to_thread(self._account.tls)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=WATCH_S + 30)
        connector = aiohttp.TCPConnector(ssl=tls)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, read_bufsize=LINE_CAP_BYTES
        ) as http:
            while True:
                has_events = False
                try:
                    if not self._version:
                        await self._list(http)
                        endpoints = await run_in_thread(partial(self._endpoints, yielded or ()))
                        if endpoints != yielded:
                            yielded = endpoints
                            yield endpoints
                    async for _ in self._events(http):
                        has_events = True
                        endpoints = await run_in_thread(partial(self._endpoints, yielded or ()))
                        if endpoints != yielded:
                            yielded = endpoints
                            yield endpoints
                except VersionExpiredError:
                    self._version = ""
                except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                    self._log_failure(error, has_events=has_events)
                    failures = 0 if has_events else failures + 1
                    if failures == FAILURES_BEFORE_RELIST:
                        self._version, failures = "", 0
                else:
                    self._is_failing, failures = False, 0
                # A watch that had events ended in the ordinary way and is resumed immediately.
                if not has_events:
                    await self._sleep(self._wait_s * self._rng.uniform(0.5, 1.0))
                    self._wait_s = min(LONGEST_PAUSE_S, 2 * self._wait_s)

    def _log_failure(self, error: Exception, *, has_events: bool) -> None:
        # Log a failure only if it is the first of an outage, because retries go on without end.
        if has_events or not self._is_failing:
            log.warning(
                "service discovery: the EndpointSlices of %s cannot be read: %s; the last "
                "known endpoints stay",
                self._spec.service,
                error,
            )
        self._is_failing = True

    def _url_and_query(self) -> tuple[str, dict[str, str]]:
        namespace = self._spec.namespace or self._account.namespace()
        url = f"{self._account.url}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        return url, {"labelSelector": f"kubernetes.io/service-name={self._spec.service}"}

    async def _list(self, http: aiohttp.ClientSession) -> None:
        url, query = self._url_and_query()
        async with http.get(url, params=query, headers=self._account.headers()) as response:
            _check_status(response)
            text = bytearray(await response.content.read(LIST_CAP_BYTES))
            while not response.content.at_eof():
                if len(text) >= LIST_CAP_BYTES:
                    raise ValueError(
                        f"the list of EndpointSlices is longer than {LIST_CAP_BYTES} bytes"
                    )
                text += await response.content.read(LIST_CAP_BYTES)
        reply = await run_in_thread(partial(json.loads, text))
        self._slices = {item["metadata"]["name"]: item for item in reply.get("items") or ()}
        self._version = reply["metadata"]["resourceVersion"]

    async def _events(self, http: aiohttp.ClientSession) -> AsyncIterator[None]:
        # Watch for changes after the known version; yield after each event.
        url, query = self._url_and_query()
        query |= {"watch": "1", "allowWatchBookmarks": "true", "resourceVersion": self._version}
        query["timeoutSeconds"] = str(int(WATCH_S))
        async with http.get(url, params=query, headers=self._account.headers()) as response:
            _check_status(response)
            while line := await response.content.readline():
                if line.strip():
                    self._apply(json.loads(line))
                    self._wait_s = FIRST_PAUSE_S
                    yield

    def _apply(self, event: dict[str, Any]) -> None:
        kind, item = event["type"], event["object"]
        if kind == "ERROR":
            if item.get("code") == STATUS_GONE:
                raise VersionExpiredError
            raise ValueError(
                "the Kubernetes API server ended the watch of EndpointSlices with status "
                f"{item.get('code')}"
            )
        name = item["metadata"].get("name", "")
        if kind == "DELETED":
            self._slices.pop(name, None)
        elif kind in ("ADDED", "MODIFIED"):
            self._slices[name] = item
        self._version = item["metadata"]["resourceVersion"]

    def _endpoints(self, earlier: DiscoveredEndpoints) -> DiscoveredEndpoints:
        # Return the endpoints of all slices; those in `earlier` are used again.
        #
        # Runs in a thread, because sorting thousands of addresses takes many milliseconds.
        families = {item.get("addressType") for item in self._slices.values()}
        # In a dual-stack Service every pod has a slice entry per family: use IPv4 only.
        family = "IPv4" if {"IPv4", "IPv6"} <= families else None
        addresses = [
            (address, port)
            for item in self._slices.values()
            if family is None or item.get("addressType") == family
            if (port := self._port(item)) is not None
            for endpoint in item.get("endpoints") or ()
            if (endpoint.get("conditions") or {}).get("ready") is not False
            for address in endpoint.get("addresses") or ()
        ]
        return specs_for(addresses, self._traits, earlier)

    def _port(self, item: dict[str, Any]) -> int | None:
        # Return the slice's port with the configured name or number, or else its first port.
        #
        # The result is None if there is no such port.
        ports = [port for port in item.get("ports") or () if port.get("port")]
        wanted = self._spec.port
        matches = [
            port
            for port in ports
            if wanted is None or wanted in (port.get("name"), str(port["port"]))
        ]
        return int(matches[0]["port"]) if matches else None


def _check_status(response: aiohttp.ClientResponse) -> None:
    if response.status == STATUS_GONE:
        raise VersionExpiredError
    if response.status != 200:
        raise ValueError(f"the Kubernetes API server responded with status {response.status}")

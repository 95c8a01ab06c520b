"""Queries one engine: a few GET requests over one connection, and one request for a single token.

The responses are kept unchanged; engine_checks.py evaluates them. The calls block; use them in
threads.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import msgspec

from gateway.protocol.response_store_probe import store_request
from gateway.util.tls_contexts import Encryption

TIMEOUT_S = 10.0
MAX_RESPONSE_BYTES = 4 << 20
METRICS_PATHS = ("/metrics", "/prometheus/metrics")
PROMPT = "1 2 3 4 5 6 7 8"
RESPONSES = "/v1/responses"
REQUEST_SCHEMAS = ("ChatCompletionRequest", "CompletionRequest")
VLLM_EXTENSIONS = frozenset({"return_token_ids", "ignore_eos"})


class ProbeResponse(msgspec.Struct, frozen=True):
    """An HTTP response of an engine.

    status  the HTTP status
    json    the body as JSON; None if it is not JSON
    text    the body as received
    took_s  seconds from the request to the end of the response
    """

    status: int
    json: Any
    text: bytes
    took_s: float


class ProbeResult(msgspec.Struct):
    """The responses of one engine to the requests of `penstock doctor`.

    A response that did not arrive is None.

    problem           why the engine could not be queried
    connection_count  connections opened for all GET requests: 1 with keep-alive
    skew_s            the engine's clock minus ours in seconds, from its Date header
    token             the response to a request for one token
    store             the response to store_request(), which shows whether the engine stores
                      responses
    events            the response at `events_path`, which says where KV events are published
    """

    url: str
    problem: str | None = None
    health: ProbeResponse | None = None
    version: ProbeResponse | None = None
    schema: ProbeResponse | None = None
    models: ProbeResponse | None = None
    metrics: ProbeResponse | None = None
    token: ProbeResponse | None = None
    store: ProbeResponse | None = None
    events: ProbeResponse | None = None
    connection_count: int = 0
    skew_s: float | None = None


class EncryptedConnection(http.client.HTTPSConnection):
    """A TLS connection whose server name may differ from the host of its URL."""

    def __init__(
        self, host: str, port: int | None, encryption: Encryption, timeout_s: float
    ) -> None:
        super().__init__(host, port, timeout=timeout_s, context=encryption.context)
        self._encryption = encryption

    def connect(self) -> None:
        """Connect and complete the TLS handshake. Raises OSError if that fails."""
        address = self.host, self.port
        raw = socket.create_connection(address, self.timeout)
        try:
            name = self._encryption.server_name or self.host
            self.sock = self._encryption.context.wrap_socket(raw, server_hostname=name)
        except OSError:
            raw.close()
            raise


class EngineConnection:
    """A keep-alive connection to an engine. It is opened again if the engine has closed it."""

    def __init__(
        self,
        url: str,
        key: str | None,
        timeout_s: float = TIMEOUT_S,
        encryption: Encryption | None = None,
    ) -> None:
        parts = urlsplit(url)
        host = parts.hostname or ""
        if encryption is None:
            self._connection = http.client.HTTPConnection(host, parts.port, timeout=timeout_s)
        else:
            self._connection = EncryptedConnection(host, parts.port, encryption, timeout_s)
        self._prefix = parts.path.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.opened = 0
        self.skew_s: float | None = None

    def request(self, method: str, path: str, body: object = None) -> ProbeResponse:
        """Send one request and return the response. Raises OSError or HTTPException.

        An engine may close an idle connection at any time. Therefore a request that fails on a
        reused connection is sent again on a new one.
        """
        reused = self._connection.sock is not None
        try:
            return self._request_once(method, path, body)
        except ConnectionError:  # this includes RemoteDisconnected
            self._connection.close()
            if not reused:
                raise
            return self._request_once(method, path, body)

    def _request_once(self, method: str, path: str, body: object) -> ProbeResponse:
        started_at = time.monotonic()
        if self._connection.sock is None:
            self._connection.connect()
            self.opened += 1
        headers = self._headers | ({"Content-Type": "application/json"} if body is not None else {})
        self._connection.request(
            method, self._prefix + path, None if body is None else json.dumps(body), headers
        )
        sent = time.time()
        response = self._connection.getresponse()
        text = response.read(MAX_RESPONSE_BYTES)
        if not response.isclosed():  # the response is longer than the limit
            self._connection.close()
        self._update_skew(response.headers.get("Date"), (sent + time.time()) / 2)
        return ProbeResponse(response.status, _json(text), text, time.monotonic() - started_at)

    def close(self) -> None:
        self._connection.close()

    def _update_skew(self, date: str | None, now: float) -> None:
        # Update the clock skew from a Date header.
        #
        # Date is truncated to whole seconds, so half a second is added.
        try:
            self.skew_s = (
                parsedate_to_datetime(date).timestamp() + 0.5 - now if date else self.skew_s
            )
        except ValueError:
            return


def probe_engine(
    url: str,
    key: str | None,
    health_path: str = "/health",
    *,
    more: Mapping[str, object] | None = None,
    encryption: Encryption | None = None,
    events_path: str = "",
) -> ProbeResult:
    """Send all queries to an engine, which takes about a second, and return the responses.

    url          URL of the engine
    key          API key; None: no key is sent
    health_path  path of the health page
    more         further members for the request for one token; None: do not send this request
    encryption   TLS settings
    events_path  path at which the engine describes its KV events; "": do not request it

    If the engine cannot be reached, `problem` of the result says why.
    """
    result, connection = ProbeResult(url), EngineConnection(url, key, encryption=encryption)
    try:
        result.health = connection.request("GET", health_path)
        result.models = connection.request("GET", "/v1/models")
        result.version = connection.request("GET", "/version")
        result.schema = connection.request("GET", "/openapi.json")
        for path in METRICS_PATHS:
            result.metrics = connection.request("GET", path)
            if result.metrics.status == 200:
                break
        if events_path:
            result.events = connection.request("GET", events_path)
        result.connection_count, result.skew_s = connection.opened, connection.skew_s
        model = next(iter(listed_models(result)), None)
        if more is not None and model is not None:
            result.token = _token(connection, token_request(model), more)
            if RESPONSES in listed_paths(result):
                result.store = connection.request("POST", RESPONSES, store_request(model))
    except (OSError, http.client.HTTPException) as error:
        result.problem = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    finally:
        connection.close()
    return result


def _token(
    connection: EngineConnection, body: Mapping[str, Any], more: Mapping[str, object]
) -> ProbeResponse:
    # Request one token, with its token ids if the engine accepts that member.
    response = connection.request("POST", "/v1/completions", {**body, **more})
    if response.status not in (400, 422):
        return response
    plain = {name: value for name, value in body.items() if name not in VLLM_EXTENSIONS}
    return connection.request("POST", "/v1/completions", {**plain, **more})


def token_request(model: str, tokens: int = 1) -> dict[str, Any]:
    """Return a completion request for `tokens` tokens that also asks for token ids."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
    return body | {"return_token_ids": True, "ignore_eos": True}


def listed_paths(result: ProbeResult) -> frozenset[str]:
    """Return the paths in the engine's OpenAPI page; empty if it has no such page."""
    page = result.schema.json if result.schema is not None and result.schema.status == 200 else None
    paths = page.get("paths") if isinstance(page, dict) else None
    return frozenset(paths) if isinstance(paths, dict) else frozenset()


def listed_models(result: ProbeResult) -> dict[str, int | None]:
    """Return the models that the engine lists, each with its context length in tokens.

    An unknown context length is None.
    """
    data = (
        result.models.json.get("data")
        if result.models is not None and isinstance(result.models.json, dict)
        else None
    )
    if not isinstance(data, list):
        return {}
    cards = [card for card in data if isinstance(card, dict) and isinstance(card.get("id"), str)]
    return {card["id"]: _number(card.get("max_model_len")) for card in cards}


def measure_decode_s(
    url: str, key: str | None, model: str, tokens: int = 32, encryption: Encryption | None = None
) -> float:
    """Measure one request to an engine; return the seconds per output token after the first one.

    Raises OSError or HTTPException.
    """
    connection = EngineConnection(url, key, timeout_s=120.0, encryption=encryption)
    try:
        short, long = (
            connection.request("POST", "/v1/completions", token_request(model, length))
            for length in (1, 1 + tokens)
        )
    finally:
        connection.close()
    for response in (short, long):
        if response.status != 200:
            raise OSError(
                f"the engine responded to the speed measurement with status {response.status}"
            )
    return max(0.0, long.took_s - short.took_s) / tokens


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None


def request_members(result: ProbeResult) -> list[frozenset[str]]:
    """Return the names of the JSON members that the engine accepts, by the type of request.

    The engine's OpenAPI page lists them. If the engine has no such page, the result is empty.
    """
    page = result.schema.json if result.schema is not None and result.schema.status == 200 else None
    components = page.get("components") if isinstance(page, dict) else None
    schemas = components.get("schemas") if isinstance(components, dict) else None
    requests = [schemas.get(name) for name in REQUEST_SCHEMAS] if isinstance(schemas, dict) else []
    members = [schema.get("properties") for schema in requests if isinstance(schema, dict)]
    return [frozenset(schema) for schema in members if isinstance(schema, dict)]

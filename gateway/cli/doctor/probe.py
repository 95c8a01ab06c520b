"""Asks one engine what it is: a few GETs over one connection, and one request for a single token.

Lives here: I/O and nothing else; what was answered is kept as it came. Blocking calls, for threads.
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

from gateway.util.tls import Encryption

TIMEOUT_S = 10.0
CAP_BYTES = 4 << 20
METRICS_PATHS = ("/metrics", "/prometheus/metrics")
PROMPT = "1 2 3 4 5 6 7 8"
REQUESTS = ("ChatCompletionRequest", "CompletionRequest")
EXTENSIONS = frozenset({"return_token_ids", "ignore_eos"})


class Said(msgspec.Struct, frozen=True):
    """An answer: its status, its JSON if it was any, its text, and how long it took, seconds."""

    status: int
    json: Any
    text: bytes
    took_s: float


class Probed(msgspec.Struct):
    """What one engine said. None: not asked, or not answered.

    problem     why nothing can be said of it         connections  opened for all of the GETs: one is keep-alive
    skew_s      its clock less ours, by Date          token        the answer to a request for one token
    """

    url: str
    problem: str | None = None
    health: Said | None = None
    version: Said | None = None
    schema: Said | None = None
    models: Said | None = None
    metrics: Said | None = None
    token: Said | None = None
    connections: int = 0
    skew_s: float | None = None


class EncryptedConnection(http.client.HTTPSConnection):
    """A connection by TLS that may ask for another server name than the host of its URL."""

    def __init__(self, host: str, port: int | None, encryption: Encryption, timeout_s: float) -> None:
        super().__init__(host, port, timeout=timeout_s, context=encryption.context)
        self._encryption = encryption

    def connect(self) -> None:
        """Connect and complete the handshake. Raises OSError."""
        address = self.host, self.port
        raw = socket.create_connection(address, self.timeout)
        try:
            name = self._encryption.server_name or self.host
            self.sock = self._encryption.context.wrap_socket(raw, server_hostname=name)
        except OSError:
            raw.close()
            raise


class Line:
    """One connection to an engine, opened anew when the engine has closed it."""

    def __init__(
        self, url: str, key: str | None, timeout_s: float = TIMEOUT_S, encryption: Encryption | None = None
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

    def ask(self, method: str, path: str, body: object = None) -> Said:
        """One answer. Raises OSError or HTTPException.

        An engine may close a kept connection at any time, so a reused one that fails is opened again once.
        """
        reused = self._connection.sock is not None
        try:
            return self._ask_once(method, path, body)
        except ConnectionError:  # RemoteDisconnected is one
            self._connection.close()
            if not reused:
                raise
            return self._ask_once(method, path, body)

    def _ask_once(self, method: str, path: str, body: object) -> Said:
        began = time.monotonic()
        if self._connection.sock is None:
            self._connection.connect()
            self.opened += 1
        headers = self._headers | ({"Content-Type": "application/json"} if body is not None else {})
        self._connection.request(method, self._prefix + path, None if body is None else json.dumps(body), headers)
        sent = time.time()
        answer = self._connection.getresponse()
        text = answer.read(CAP_BYTES)
        if not answer.isclosed():  # longer than we read
            self._connection.close()
        self._look_at(answer.headers.get("Date"), (sent + time.time()) / 2)
        return Said(answer.status, _json(text), text, time.monotonic() - began)

    def close(self) -> None:
        self._connection.close()

    def _look_at(self, date: str | None, now: float) -> None:
        """The Date of an answer has whole seconds, cut off: half of one is added."""
        try:
            self.skew_s = parsedate_to_datetime(date).timestamp() + 0.5 - now if date else self.skew_s
        except ValueError:
            return


def probe(
    url: str,
    key: str | None,
    health_path: str = "/health",
    *,
    more: Mapping[str, object] | None = None,
    encryption: Encryption | None = None,
) -> Probed:
    """Everything, in a second or so; `problem` is set when the engine cannot be reached.

    `more` is what a request for one token needs beside the usual; None: ask for none.
    """
    found, line = Probed(url), Line(url, key, encryption=encryption)
    try:
        found.health = line.ask("GET", health_path)
        found.models = line.ask("GET", "/v1/models")
        found.version = line.ask("GET", "/version")
        found.schema = line.ask("GET", "/openapi.json")
        for path in METRICS_PATHS:
            found.metrics = line.ask("GET", path)
            if found.metrics.status == 200:
                break
        found.connections, found.skew_s = line.opened, line.skew_s
        model = next(iter(models_of(found)), None)
        if more is not None and model is not None:
            found.token = _token(line, one_token(model), more)
    except (OSError, http.client.HTTPException) as error:
        found.problem = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    finally:
        line.close()
    return found


def _token(line: Line, wanted: Mapping[str, Any], more: Mapping[str, object]) -> Said:
    """One token, with its id if the engine knows how to tell: some refuse what they do not know."""
    said = line.ask("POST", "/v1/completions", {**wanted, **more})
    if said.status not in (400, 422):
        return said
    plain = {name: value for name, value in wanted.items() if name not in EXTENSIONS}
    return line.ask("POST", "/v1/completions", {**plain, **more})


def one_token(model: str, tokens: int = 1) -> dict[str, Any]:
    """A request for so many tokens that tells token ids where the engine can."""
    wanted = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
    return wanted | {"return_token_ids": True, "ignore_eos": True}


def models_of(found: Probed) -> dict[str, int | None]:
    """Names of the models it lists, with their context in tokens if told."""
    data = found.models.json.get("data") if found.models is not None and isinstance(found.models.json, dict) else None
    if not isinstance(data, list):
        return {}
    cards = [card for card in data if isinstance(card, dict) and isinstance(card.get("id"), str)]
    return {card["id"]: _number(card.get("max_model_len")) for card in cards}


def decode_s(url: str, key: str | None, model: str, tokens: int = 32, encryption: Encryption | None = None) -> float:
    """Seconds per output token of one request, its first token's time taken off. Raises OSError or HTTPException."""
    line = Line(url, key, timeout_s=120.0, encryption=encryption)
    try:
        short, long = (line.ask("POST", "/v1/completions", one_token(model, length)) for length in (1, 1 + tokens))
    finally:
        line.close()
    for said in (short, long):
        if said.status != 200:
            raise OSError(f"status {said.status}")
    return max(0.0, long.took_s - short.took_s) / tokens


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _number(value: object) -> int | None:
    return value if isinstance(value, int) else None


def request_members(found: Probed) -> list[frozenset[str]]:
    """The members of each of the two requests, as its OpenAPI page names them; empty where it shows no such page."""
    page = found.schema.json if found.schema is not None and found.schema.status == 200 else None
    components = page.get("components") if isinstance(page, dict) else None
    schemas = components.get("schemas") if isinstance(components, dict) else None
    requests = [schemas.get(name) for name in REQUESTS] if isinstance(schemas, dict) else []
    members = [each.get("properties") for each in requests if isinstance(each, dict)]
    return [frozenset(each) for each in members if isinstance(each, dict)]

"""Compares the answers of a real engine and of the gateway in front of it.

Identifiers and times may differ, and the same tokens may arrive in other pieces. Everything else
must be equal, numbers to 4 digits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import aiohttp
import msgspec

from tests.real.engine_requests import is_close

# Members that differ between equal answers: ids and times.
IDS = frozenset(
    (
        "id",
        "created",
        "created_at",
        "completed_at",
        "request_id",
        "item_id",
        "call_id",
        "sequence_number",
    )
)
# Members with a piece of the answer's text or tokens. Streams of equal answers may be divided into
# pieces differently.
PIECES = frozenset(
    (
        "content",
        "text",
        "delta",
        "arguments",
        "partial_json",
        "tokens",
        "token_logprobs",
        "top_logprobs",
        "text_offset",
    )
)
PATIENCE_S = 300.0


class Reply(msgspec.Struct, frozen=True):
    """A whole HTTP answer of an engine or a gateway.

    events  the events of a stream, as (name, data)
    body    the body of any other answer
    """

    status: int
    body: Any = None
    events: tuple[tuple[str, Any], ...] = ()

    @property
    def message(self) -> str:
        """Return the message of an error answer, whose format may be that of any API."""
        error = self.body.get("error", self.body) if isinstance(self.body, dict) else self.body
        return str(error.get("message") if isinstance(error, dict) else error)


async def send(
    url: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    method: str = "POST",
    headers: Mapping[str, str] | None = None,
) -> Reply:
    """Send an HTTP request and return the whole answer."""
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as http,
        http.request(method, url + path, json=body, headers=headers) as answer,
    ):
        text = await answer.text()
        if answer.content_type == "text/event-stream":
            return Reply(answer.status, events=tuple(_events(text)))
        try:
            return Reply(answer.status, json.loads(text) if text else None)
        except ValueError:
            return Reply(answer.status, text)


def _events(text: str) -> Iterator[tuple[str, Any]]:
    for event in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in event.splitlines() if ": " in line)
        if "data" in lines:
            data = lines["data"]
            yield lines.get("event", ""), data if data == "[DONE]" else json.loads(data)


def unlike(reply: Reply, engine: Reply, names: tuple[str, str]) -> list[str]:
    """Return, as text, how the gateway's answer differs from that of the engine behind it.

    reply   the gateway's answer
    engine  the engine's answer
    names   the model's name in a request to the gateway, and in one to the engine
    """
    if reply.status != engine.status:
        return [f"status {reply.status} {reply.body}, the engine's {engine.status} {engine.body}"]
    return list(_differences(_plain(reply, names[0]), _plain(engine, names[1]), ""))


def _plain(reply: Reply, model: str) -> Any:
    # Return the body of an answer; for a stream, the kinds of its events and their joined text.
    if not reply.events:
        return _without_ids(reply.body, model)
    kinds: list[Any] = []
    pieces: dict[str, Any] = {}
    for name, data in reply.events:
        kind = [name, _without_pieces(_without_ids(data, model), pieces, name)]
        if not kinds or kind != kinds[-1]:
            kinds.append(kind)
    return {"kinds": kinds, "pieces": pieces}


def _without_ids(value: Any, model: str) -> Any:
    if isinstance(value, list):
        return [_without_ids(each, model) for each in value]
    if not isinstance(value, dict):
        return value
    plain = {name: _without_ids(member, model) for name, member in value.items()}
    plain |= {name: "*" for name in IDS if isinstance(plain.get(name), str | int | float)}
    return plain | ({"model": "the model"} if plain.get("model") == model else {})


def _without_pieces(value: Any, pieces: dict[str, Any], where: str) -> Any:
    # Return an event without its text and tokens. They are appended to `pieces`.
    if isinstance(value, list):
        return [
            _without_pieces(each, pieces, f"{where}[{place}]") for place, each in enumerate(value)
        ]
    if not isinstance(value, dict):
        return value
    kept = {}
    for name, member in value.items():
        path = f"{where}.{name}"
        if name in PIECES and isinstance(member, str | list):
            pieces[path] = pieces[path] + member if path in pieces else member
        else:
            kept[name] = _without_pieces(member, pieces, path)
    return kept


def _differences(one: Any, other: Any, where: str) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for name in sorted(one.keys() | other.keys()):
            if name not in one or name not in other:
                yield f"{where}.{name} only in {'the engine' if name in other else 'the gateway'}'s"
            else:
                yield from _differences(one[name], other[name], f"{where}.{name}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for place, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from _differences(a, b, f"{where}[{place}]")
    elif isinstance(one, float) and isinstance(other, float | int):
        if not is_close(one, other):
            yield f"{where}: {one} and {other}"
    elif one != other:
        yield f"{where}: {one!r:.200} and {other!r:.200}"

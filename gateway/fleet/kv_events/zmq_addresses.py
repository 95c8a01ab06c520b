"""Finds the ZeroMQ addresses at which engines publish KV events. No I/O.

The addresses come from the configuration, or from a page on which the engine describes itself. An
address is `tcp://host:port`, and each data-parallel rank has its own port.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import msgspec

from gateway.config.kv_event_sections import KvEvents

VLLM_PATH, SGLANG_PATH = "/kv_event_sources", "/server_info"
MAX_RANKS = 1024
_WILDCARDS = ("*", "0.0.0.0", "[::]", "::", "localhost", "127.0.0.1")


class SourceAddress(msgspec.Struct, frozen=True):
    """The ZeroMQ addresses of one engine rank's KV events, as tcp://host:port.

    events  where the rank publishes its events
    replay  where it sends earlier events again on request; "" if it does not offer that
    topic   the ZeroMQ topic to subscribe to
    """

    events: str
    replay: str
    topic: str


class SourceError(Exception):
    """Raised when an engine has no usable source of KV events; the message gives the reason."""


def configured_addresses(spec: KvEvents, url: str, ranks: int) -> list[SourceAddress]:
    """Return the configured addresses of KV events: one per rank, on consecutive ports.

    url    the engine's URL, whose host is used if the configuration gives only a port
    ranks  number of the engine's data-parallel ranks
    """
    assert spec.publisher is not None
    host, port = _split(spec.publisher, url)
    replay = None if spec.replay is None else _split(spec.replay, url)
    return [
        SourceAddress(
            f"tcp://{host}:{port + rank}",
            "" if replay is None else f"tcp://{replay[0]}:{replay[1] + rank}",
            spec.topic,
        )
        for rank in range(ranks)
    ]


def of_rank(addresses: list[SourceAddress], rank: int | None) -> list[SourceAddress]:
    """Select the KV event addresses of one data-parallel rank; None as `rank` selects all.

    Raises SourceError if the engine has no such rank.
    """
    if rank is None:
        return addresses
    if rank >= len(addresses):
        raise SourceError(
            f"the engine publishes KV events of {len(addresses)} ranks, but not of rank {rank}"
        )
    return [addresses[rank]]


def described_by_vllm(status: int, body: bytes, url: str) -> list[SourceAddress]:
    """Parse vLLM's response to GET /kv_event_sources into addresses, one per rank.

    url  the engine's URL; its host replaces a wildcard host such as `*`

    Raises SourceError if the engine publishes no events.
    """
    described = _object(status, body, VLLM_PATH)
    ranks = sorted(described, key=lambda rank: int(rank) if rank.isdecimal() else MAX_RANKS)
    addresses = []
    for rank in ranks[:MAX_RANKS]:
        source = described[rank]
        if not isinstance(source, dict) or not source.get("enable_kv_cache_events"):
            continue
        events, replay = source.get("endpoint"), source.get("replay_endpoint")
        addresses.append(
            SourceAddress(
                _reachable(events, url),
                _reachable(replay, url) if replay else "",
                str(source.get("topic") or ""),
            )
        )
    if not addresses:
        raise SourceError("the engine publishes no KV events; start it with --kv-events-config")
    return addresses


def described_by_sglang(status: int, body: bytes, url: str) -> list[SourceAddress]:
    """Parse SGLang's response to GET /server_info into addresses, one per rank.

    url  the engine's URL; its host replaces a wildcard host such as `*`

    Raises SourceError if the engine publishes no events.
    """
    events = _object(status, body, SGLANG_PATH).get("kv_events")
    if not isinstance(events, dict) or not isinstance(events.get("endpoint_port_base"), int):
        raise SourceError("the engine publishes no KV events; start it with --kv-events-config")
    host = str(events.get("endpoint_host") or "*")
    first, replay = events["endpoint_port_base"], events.get("replay_endpoint_port_base")
    ranks = events.get("dp_size")
    count = ranks if isinstance(ranks, int) and 0 < ranks <= MAX_RANKS else 1
    return [
        SourceAddress(
            _reachable(f"tcp://{host}:{first + rank}", url),
            _reachable(f"tcp://{host}:{replay + rank}", url) if isinstance(replay, int) else "",
            str(events.get("topic") or ""),
        )
        for rank in range(count)
    ]


def _object(status: int, body: bytes, path: str) -> dict[str, Any]:
    if status != 200:
        raise SourceError(
            f"the engine responds to GET {path} with status {status}; set "
            "kv_events.publisher instead"
        )
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise SourceError(f"the engine's response to GET {path} is not a JSON object") from None


def _reachable(address: object, url: str) -> str:
    # Return the address with the engine's own host in place of a wildcard. Raises SourceError.
    text = str(address)
    scheme, separator, rest = text.partition("://")
    host, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not separator or not colon or not port.isdecimal():
        raise SourceError(f"the KV event address {text[:80]!r} does not start with tcp://")
    return f"tcp://{_own_host(url) if host in _WILDCARDS else host}:{port}"


def _split(address: str, url: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host or _own_host(url), int(port)


def _own_host(url: str) -> str:
    host = urlsplit(url).hostname or ""
    return f"[{host}]" if ":" in host else host

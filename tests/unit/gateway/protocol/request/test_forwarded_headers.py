"""Tests of forwarding headers (X-Forwarded-For etc.) of trusted proxies and of other clients."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from gateway.protocol.request.forwarded_headers import TrustedProxies, proxy_request_id
from gateway.util.client_networks import Networks
from tests.chaos.gateway_fleet import gateway_fleet

PROXIES = TrustedProxies(Networks(["10.0.0.0/8", "2001:db8:1::/48"]))
PEER = "10.0.0.1"


@pytest.mark.parametrize(
    ("forwarded", "client"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("203.0.113.9, 192.0.2.7", "192.0.2.7"),  # the client itself wrote the left one
        ("192.0.2.7, 10.1.2.3", "192.0.2.7"),  # two proxies in a row
        ("192.0.2.7:4711", "192.0.2.7"),
        ("[2001:db8:2::5]:4711, 2001:db8:1::1", "2001:db8:2::5"),
        ("10.9.9.9", "10.9.9.9"),
        ("192.0.2.7, unknown", PEER),
        ("unknown, 192.0.2.7", "192.0.2.7"),
        ("", PEER),
        (",".join(["10.0.0.2"] * 100_000), "10.0.0.2"),
    ],
)
def test_the_client_is_the_rightmost_address_that_is_not_a_trusted_proxy(
    forwarded: str, client: str
) -> None:
    assert PROXIES.client_address({"x-forwarded-for": forwarded}, PEER) == client


def test_a_second_header_line_continues_the_list() -> None:
    headers = CIMultiDict([("X-Forwarded-For", "203.0.113.9"), ("X-Forwarded-For", "192.0.2.7")])
    assert PROXIES.client_address(headers, PEER) == "192.0.2.7"


@given(st.text(max_size=200))
def test_any_text_yields_the_peer_or_an_address_from_the_text(text: str) -> None:
    result = PROXIES.client_address({"x-forwarded-for": text}, PEER)
    assert result == PEER or ":" in result or result.count(".") == 3


@pytest.mark.parametrize(
    ("text", "is_logged"), [("a1b2-c3", True), ("x" * 129, False), ("a b", False), ('a"b', False)]
)
def test_an_id_with_odd_characters_is_not_logged(text: str, is_logged: bool) -> None:
    assert proxy_request_id({"x-request-id": text}) == (text if is_logged else "")


async def access_line_of(folder: Path, trusted: list[str], headers: list[str]) -> dict[str, object]:
    # Send a request from 127.0.0.1 with these header lines; return its access log entry.
    log = folder / "access.jsonl"
    observability = {"access_log": str(log), "access_flush": "10ms"}
    listeners = {"api": {"port": 0, "trusted_proxies": trusted}, "admin": {"port": 0}}
    async with gateway_fleet(1, observability=observability, listeners=listeners) as fleet:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", int(fleet.app.url.rpartition(":")[2])
        )
        body = b'{"model": "demo-8b", "prompt": "hi", "max_tokens": 1}'
        lines = ["POST /v1/completions HTTP/1.1", "host: a", "content-type: application/json"]
        head = "\r\n".join(
            [*lines, f"content-length: {len(body)}", *headers, "connection: close", "", ""]
        )
        writer.write(head.encode() + body)
        assert b" 200 " in await reader.read()
        writer.close()
        await fleet.at_rest()
    result: dict[str, object] = json.loads(log.read_text())
    return result


CLAIMS = ["X-Forwarded-For: 203.0.113.9, 192.0.2.7", "X-Request-Id: edge-77"]


async def test_headers_of_a_trusted_proxy_appear_in_the_access_log(tmp_path: Path) -> None:
    line = await access_line_of(tmp_path, ["127.0.0.0/8"], CLAIMS)
    assert (line["client"], line["proxy_request_id"]) == ("192.0.2.7", "edge-77")
    assert str(line["id"]).startswith("req_")


async def test_forwarding_headers_of_other_clients_are_ignored(tmp_path: Path) -> None:
    line = await access_line_of(tmp_path, ["10.0.0.0/8"], CLAIMS)
    assert line["client"] == "127.0.0.1"
    assert "proxy_request_id" not in line

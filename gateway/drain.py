"""`penstock drain` and `penstock undrain`: take an endpoint out of routing by hand, and bring it back.

Lives here: asking a running gateway, and waiting for the endpoint's requests to finish.
"""

from __future__ import annotations

import time
from typing import Annotated, Any
from urllib.parse import quote

import typer

from gateway.admin_client import AdminAddress, KeyFile, Server, with_admin_options
from gateway.commands import Json, fail, print_json, say

POLL_S = 0.5

Endpoint = Annotated[str, typer.Argument(metavar="ENDPOINT", help="Its name, as `penstock top` shows it.")]


@with_admin_options
def drain(
    admin: AdminAddress,
    endpoint: Endpoint,
    wait: Annotated[bool, typer.Option("--wait", help="Return when its last request has finished.")] = False,
    timeout: Annotated[float, typer.Option("--timeout", min=0, help="Seconds to wait at most.")] = 600.0,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Send an endpoint no new requests. Requests that it serves now finish there. Lasts until undrain or a restart."""
    server = Server(admin, key_file)
    reply = _change(server, endpoint, "drain")
    if wait:
        reply["in_flight"] = _wait_until_idle(server, endpoint, time.monotonic() + timeout)
    if as_json:
        print_json(reply)
    else:
        say(f"{endpoint} is drained; {reply['in_flight']} requests in flight there")
    if wait and reply["in_flight"]:
        fail(f"{endpoint} still serves {reply['in_flight']} requests after {timeout:g} s")


@with_admin_options
def undrain(
    admin: AdminAddress,
    endpoint: Endpoint,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Send an endpoint requests again."""
    reply = _change(Server(admin, key_file), endpoint, "undrain")
    if as_json:
        print_json(reply)
    else:
        say(f"{endpoint} gets requests again")


def _change(server: Server, endpoint: str, action: str) -> dict[str, Any]:
    reply: dict[str, Any] = server.ask("POST", f"/endpoints/{quote(endpoint, safe='')}/{action}")
    if reply["result"] != "applied":
        known = ", ".join(sorted(each["name"] for each in server.ask("GET", "/endpoints")["endpoints"]))
        fail(f"{reply['message']}; the endpoints are {known}")
    return reply


def _wait_until_idle(server: Server, endpoint: str, deadline: float) -> int:
    """Requests of this gateway that the endpoint still serves: 0, or those left at the deadline."""
    while True:
        endpoints = server.ask("GET", "/endpoints")["endpoints"]
        left: int = sum(each["in_flight"] for each in endpoints if each["name"] == endpoint)
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(POLL_S)

"""`penstock drain` and `penstock undrain`: stop and resume routing to an endpoint.

Lives here: the admin requests, and the wait until the endpoint's requests have finished.
"""

from __future__ import annotations

import time
from typing import Annotated, Any
from urllib.parse import quote

import typer

from gateway.cli.admin_client import AdminAddress, KeyFile, Server, with_admin_options
from gateway.cli.output import Json, fail, print_json, say

POLL_S = 0.5

Endpoint = Annotated[
    str,
    typer.Argument(metavar="ENDPOINT", help="Name of the endpoint, as `penstock top` shows it."),
]


@with_admin_options
def drain(
    admin: AdminAddress,
    endpoint: Endpoint,
    wait: Annotated[
        bool, typer.Option("--wait", help="Return when its last request has finished.")
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0, help="Longest wait in seconds.")
    ] = 600.0,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Send no new requests to an endpoint. Its running requests finish there.

    The drain lasts until undrain, or until the gateway restarts.
    """
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
    """Send requests to an endpoint again."""
    reply = _change(Server(admin, key_file), endpoint, "undrain")
    if as_json:
        print_json(reply)
    else:
        say(f"{endpoint} gets requests again")


def _change(server: Server, endpoint: str, action: str) -> dict[str, Any]:
    path = f"/endpoints/{quote(endpoint, safe='')}/{action}"
    reply: dict[str, Any] = server.ask("POST", path)
    if reply["result"] != "applied":
        known = sorted(row["name"] for row in server.ask("GET", "/endpoints")["endpoints"])
        fail(f"{reply['message']}; the endpoints are {', '.join(known)}")
    return reply


def _wait_until_idle(server: Server, endpoint: str, deadline: float) -> int:
    """Wait until the endpoint has finished this gateway's requests; return how many are left."""
    while True:
        rows = server.ask("GET", "/endpoints")["endpoints"]
        left: int = sum(row["in_flight"] for row in rows if row["name"] == endpoint)
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(POLL_S)

"""The commands `penstock drain` and `penstock undrain`.

They stop and resume routing to one endpoint of a running gateway through its admin server.
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
    str, typer.Argument(metavar="ENDPOINT", help="Endpoint name, as in `penstock top`.")
]


@with_admin_options
def drain(
    admin: AdminAddress,
    endpoint: Endpoint,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until its last request has finished.")
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0, help="Longest time to wait, in seconds.")
    ] = 600.0,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Stop routing new requests to an endpoint; its current requests finish.

    Lasts until `penstock undrain` or a restart of the gateway.
    """
    server = Server(admin, key_file)
    reply = _change(server, endpoint, "drain")
    if wait:
        reply["in_flight"] = _wait_until_idle(server, endpoint, time.monotonic() + timeout)
    if as_json:
        print_json(reply)
    else:
        say(f"{endpoint} is drained; {reply['in_flight']} requests in flight")
    if wait and reply["in_flight"]:
        fail(f"{endpoint} still has {reply['in_flight']} requests in flight after {timeout:g} s")


@with_admin_options
def undrain(
    admin: AdminAddress,
    endpoint: Endpoint,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Resume routing requests to a drained endpoint."""
    reply = _change(Server(admin, key_file), endpoint, "undrain")
    if as_json:
        print_json(reply)
    else:
        say(f"{endpoint} receives requests again")


def _change(server: Server, endpoint: str, action: str) -> dict[str, Any]:
    path = f"/endpoints/{quote(endpoint, safe='')}/{action}"
    reply: dict[str, Any] = server.ask("POST", path)
    if reply["result"] != "applied":
        names = ", ".join(
            sorted(row["name"] for row in server.ask("GET", "/endpoints")["endpoints"])
        )
        fail(f"{reply['message']}; the endpoints are {names}")
    return reply


def _wait_until_idle(server: Server, endpoint: str, deadline: float) -> int:
    """Wait until this gateway has no request in flight at the endpoint.

    Returns the number of requests left at the deadline, or 0.
    """
    while True:
        endpoints = server.ask("GET", "/endpoints")["endpoints"]
        in_flight: int = sum(row["in_flight"] for row in endpoints if row["name"] == endpoint)
        if not in_flight or time.monotonic() >= deadline:
            return in_flight
        time.sleep(POLL_S)

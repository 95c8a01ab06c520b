"""The commands `penstock drain` and `penstock undrain`: stop and resume routing to an endpoint.

Both send a request to the admin server of a running gateway.
"""

from __future__ import annotations

import time
from typing import Annotated, Any
from urllib.parse import quote

from command_line import Argument, Option
from gateway.cli.admin_client import AdminAddress, AdminClient, KeyFileOption, with_admin_options
from gateway.cli.shared_options import JsonOption
from gateway.cli.terminal_output import exit_with_error, print_json, print_line

POLL_S = 0.5

EndpointArgument = Annotated[
    str,
    Argument(metavar="ENDPOINT", help="Name of the endpoint, as `penstock top` shows it."),
]


@with_admin_options
def drain(
    admin: AdminAddress,
    endpoint: EndpointArgument,
    wait: Annotated[
        bool,
        Option(
            "--wait", help="Wait until the endpoint's last request has finished, and exit then."
        ),
    ] = False,
    timeout: Annotated[
        float,
        Option(
            "--timeout",
            min=0,
            help="With --wait: maximum time to wait for the last request, in seconds.",
        ),
    ] = 600.0,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop routing new requests to an endpoint; its current requests finish.

    This lasts until `penstock undrain` or a restart of the gateway.
    """
    server = AdminClient(admin, key_file)
    reply = _change(server, endpoint, "drain")
    if wait:
        reply["in_flight"] = _wait_until_idle(server, endpoint, time.monotonic() + timeout)
    if as_json:
        print_json(reply)
    else:
        print_line(f"{endpoint} is drained; {reply['in_flight']} requests in flight")
    if wait and reply["in_flight"]:
        exit_with_error(
            f"{endpoint} still has {reply['in_flight']} requests in flight after {timeout:g} s"
        )


@with_admin_options
def undrain(
    admin: AdminAddress,
    endpoint: EndpointArgument,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Resume routing requests to a drained endpoint."""
    reply = _change(AdminClient(admin, key_file), endpoint, "undrain")
    if as_json:
        print_json(reply)
    else:
        print_line(f"{endpoint} receives requests again")


def _change(server: AdminClient, endpoint: str, action: str) -> dict[str, Any]:
    path = f"/endpoints/{quote(endpoint, safe='')}/{action}"
    reply: dict[str, Any] = server.request("POST", path)
    if reply["result"] != "applied":
        names = ", ".join(
            sorted(row["name"] for row in server.request("GET", "/endpoints")["endpoints"])
        )
        exit_with_error(f"{reply['message']}; the endpoints are {names}")
    return reply


def _wait_until_idle(server: AdminClient, endpoint: str, deadline: float) -> int:
    # Wait until this gateway has no request in flight at the endpoint.
    #
    # Returns the number of requests left at the deadline, or 0.
    while True:
        endpoints = server.request("GET", "/endpoints")["endpoints"]
        in_flight: int = sum(row["in_flight"] for row in endpoints if row["name"] == endpoint)
        if not in_flight or time.monotonic() >= deadline:
            return in_flight
        time.sleep(POLL_S)

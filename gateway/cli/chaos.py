"""The command `penstock chaos`: inject faults into mock engines and report how the gateway reacts.

This module converts actions to faults and prints the report. mockgpu implements the faults. A mock
accepts faults only on its fault injection server (`--chaos-port`), and only from its own machine.
The endpoint's label `chaos` has the address of that server, which must be a loopback address.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from enum import StrEnum
from ipaddress import ip_address
from types import MappingProxyType
from typing import Annotated, Any
from urllib.parse import urlsplit

from command_line import Argument, Option, UsageError
from gateway.cli.admin_client import AdminAddress, AdminClient, with_admin_options
from gateway.cli.shared_options import JsonOption
from gateway.cli.terminal_output import exit_with_error, print_json, print_line
from gateway.util.durations_and_sizes import parse_duration

LABEL = "chaos"
# Recovery takes longer to show than a failure: the longer an endpoint is out of rotation, the less
# often the gateway probes it.
FAILURE_TIMEOUT_S, RECOVERY_TIMEOUT_S = 10.0, 60.0
POLL_S = 0.05
SETTLE_S = 0.6
ANSWER_CAP_BYTES = 1 << 16


class ChaosAction(StrEnum):
    """A fault that `penstock chaos` injects into a mock TP group, or the removal of all faults."""

    KILL = "kill"
    FREEZE = "freeze"
    SLOW = "slow"
    LOSE_RANK = "lose-rank"
    PARTITION = "partition"
    RESTORE = "restore"


class Only(StrEnum):
    """Which engine steps the fault `slow` delays: those with prompt tokens, or those without."""

    PREFILL = "prefill"
    DECODE = "decode"


ACTION_VERBS: Mapping[ChaosAction, str] = MappingProxyType(
    {
        ChaosAction.KILL: "killed",
        ChaosAction.FREEZE: "froze",
        ChaosAction.SLOW: "slowed down",
        ChaosAction.LOSE_RANK: "took a GPU from",
        ChaosAction.PARTITION: "cut off",
        ChaosAction.RESTORE: "restored",
    }
)
UNDETECTED = frozenset({ChaosAction.SLOW})
"""Chaos actions that cause no failure of a health check."""

ForOption = Annotated[
    str | None,
    Option(
        "--for",
        metavar="TIME",
        help="Remove the fault after this time, for example 10s; default: it stays until restore.",
    ),
]


ActionArgument = Annotated[
    ChaosAction, Argument(help="Fault to inject; the action restore removes faults.")
]
EndpointNames = Annotated[
    list[str] | None,
    Argument(help="Names of the endpoints to act on; for restore, no name means all endpoints."),
]
FactorOption = Annotated[
    float,
    Option(
        "--factor",
        min=0.01,
        help="For the fault slow: factor by which engine steps take longer, for example 10.",
    ),
]
OnlyOption = Annotated[
    Only | None,
    Option(
        "--only",
        help="For the fault slow: delay only this kind of engine steps; default: all steps.",
    ),
]
RankOption = Annotated[
    int,
    Option(
        "--rank",
        min=0,
        help="For the fault lose-rank: number of the GPU (rank) that the group loses.",
    ),
]
HangOption = Annotated[
    bool,
    Option("--hang", help="For the fault lose-rank: let the other ranks hang instead of failing."),
]


@with_admin_options
def chaos(
    admin: AdminAddress,
    action: ActionArgument,
    target: EndpointNames = None,
    factor: FactorOption = 10.0,
    only: OnlyOption = None,
    rank: RankOption = 0,
    hang: HangOption = False,
    lasting: ForOption = None,
    as_json: JsonOption = False,
) -> None:
    """Inject a fault into mock TP groups and report how the gateway reacts.

    The action `restore` removes the faults.
    """
    server = AdminClient(admin, None)
    fleet = {row["name"]: row for row in server.request("GET", "/endpoints")["endpoints"]}
    names = _select_endpoints(action, target, fleet)
    spec = _fault_spec(
        action,
        _slow_fault(factor, only),
        rank,
        hang,
        None if lasting is None else _parse_lasting(lasting),
    )
    fault_servers = {name: _fault_server(name, fleet) for name in names}
    before = server.request("GET", "/live")["totals"]["since_start"]
    results = [
        _inject(server, name, address, spec, action) for name, address in fault_servers.items()
    ]
    if action is ChaosAction.RESTORE and not target:  # report only the groups that had a fault
        results = [result for result in results if result["before"]]
    if action is not ChaosAction.RESTORE:
        time.sleep(SETTLE_S)  # the live view is updated twice a second
    after = server.request("GET", "/live")["totals"]["since_start"]
    counts = {key: after[key] - before[key] for key in ("failed", "retries")}
    if as_json:
        print_json({"action": action, "spec": spec, "targets": results, "since": counts})
    else:
        _print_results(results, counts, action)


def _select_endpoints(
    action: ChaosAction, target: list[str] | None, fleet: Mapping[str, Any]
) -> list[str]:
    # Return the endpoints to act on; `restore` without names selects all that accept faults.
    if target:
        return target
    if action is not ChaosAction.RESTORE:
        raise UsageError(
            "name the endpoint to act on: " + (", ".join(fleet) or "the gateway has none")
        )
    names = [name for name, row in fleet.items() if LABEL in row["labels"]]
    if not names:
        exit_with_error(
            f"no endpoint accepts faults: none has the label {LABEL!r}, "
            "which `penstock demo` gives its mock TP groups"
        )
    return names


def _slow_fault(factor: float, only: Only | None) -> str:
    return f"slow:x={factor:g}" + (f":{only}" if only is not None else "")


def _fault_spec(
    action: ChaosAction, slow: str, rank: int, hang: bool, lasting_s: float | None
) -> str:
    # Return the faults of an action, in the notation of mockgpu.
    #
    # A killed group also loses its cache, as a process that ends does.
    faults = {
        ChaosAction.KILL: ("refuse", "lost-rank"),
        ChaosAction.FREEZE: ("freeze",),
        ChaosAction.SLOW: (slow,),
        ChaosAction.LOSE_RANK: (f"lost-rank:rank={rank}" + (":hang" if hang else ""),),
        ChaosAction.PARTITION: ("partition",),
        ChaosAction.RESTORE: (),
    }[action]
    window = "" if lasting_s is None else f"@0-{lasting_s:g}"
    return ",".join(f"{fault}{window}" for fault in faults)


def _parse_lasting(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise UsageError(f"--for: {error}") from None


def _fault_server(name: str, fleet: Mapping[str, Any]) -> tuple[str, int]:
    # Return host and port of the server that sets this endpoint's faults.
    #
    # Prints a message and exits when there is none.
    if name not in fleet:
        raise UsageError(f"no endpoint is named {name!r}; the endpoints are {', '.join(fleet)}")
    label = fleet[name]["labels"].get(LABEL)
    if label is None:
        exit_with_error(
            f"{name} does not accept faults: it has no label {LABEL!r}, "
            "which `penstock demo` gives its mock TP groups"
        )
    host, _, port = label.rpartition(":")
    try:
        address, number = ip_address(host), int(port)
    except ValueError:
        exit_with_error(f"the label {LABEL!r} of {name} is not ADDRESS:PORT: {label!r}")
    if not address.is_loopback:
        exit_with_error(
            f"the label {LABEL!r} of {name} is an address of another machine, {label}; "
            "run `penstock chaos` on that machine"
        )
    return str(address), number


def _inject(
    server: AdminClient, name: str, fault_server: tuple[str, int], spec: str, action: ChaosAction
) -> dict[str, Any]:
    # Set the faults of an endpoint, and wait until the gateway detects them; return the result.
    url = _endpoint_row(server, name)["url"]
    reply = _post(fault_server, f"/faults/{urlsplit(url).port}", {"spec": spec}, name)
    started_at, should_be_available = time.monotonic(), action is ChaosAction.RESTORE
    timeout_s = RECOVERY_TIMEOUT_S if should_be_available else FAILURE_TIMEOUT_S
    endpoint_state: dict[str, Any] = _endpoint_row(server, name)
    while (
        action not in UNDETECTED
        and endpoint_state["available"] != should_be_available
        and time.monotonic() - started_at < timeout_s
    ):
        time.sleep(POLL_S)
        endpoint_state = _endpoint_row(server, name)
    noticed = action not in UNDETECTED and endpoint_state["available"] == should_be_available
    fleet = server.request("GET", "/endpoints")["endpoints"]
    return {
        "name": name,
        "url": url,
        "before": reply["before"],
        "requests": reply["jobs"],
        "noticed_s": round(time.monotonic() - started_at, 2) if noticed else None,
        "state": endpoint_state["state"],
        "cause": endpoint_state["cause"],
        "serving": sum(row["available"] for row in fleet),
        "endpoints": len(fleet),
    }


def _endpoint_row(server: AdminClient, name: str) -> dict[str, Any]:
    fleet = server.request("GET", "/endpoints")["endpoints"]
    match: dict[str, Any] | None = next((row for row in fleet if row["name"] == name), None)
    if match is None:
        exit_with_error(f"{name} has been removed from the configuration")
    return match


def _post(
    fault_server: tuple[str, int], path: str, body: Mapping[str, object], name: str
) -> dict[str, Any]:
    connection = http.client.HTTPConnection(*fault_server, timeout=5.0)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        reply: dict[str, Any] = json.loads(response.read(ANSWER_CAP_BYTES))
    except (OSError, http.client.HTTPException, ValueError) as error:
        exit_with_error(
            f"cannot set faults of {name} at {fault_server[0]}:{fault_server[1]}: {error}; "
            "was its mock started with --chaos-port?"
        )
    finally:
        connection.close()
    if response.status != 200:
        exit_with_error(
            f"the mock of {name} refused the fault: {reply.get('error', response.status)}"
        )
    return reply


def _print_results(
    results: list[dict[str, Any]], counts: Mapping[str, int], action: ChaosAction
) -> None:
    if not results:
        print_line("no mock TP group has a fault")
    for result in results:
        _print_result(result, action)
    if action is not ChaosAction.RESTORE and any(counts.values()):
        print_line(
            f"{counts['retries']} requests were retried on other endpoints, "
            f"{counts['failed']} failed"
        )


def _print_result(result: Mapping[str, Any], action: ChaosAction) -> None:
    requests = (
        f"; it had {result['requests']} requests" if action is not ChaosAction.RESTORE else ""
    )
    print_line(
        f"{ACTION_VERBS[action]} {result['name']} ({result['url']}){requests}",
        style="yellow" if requests else "green",
    )
    serving = f"{result['serving']} of {result['endpoints']} endpoints serve"
    if action in UNDETECTED:
        print_line("health checks do not detect this; policies see it in the response times")
    elif result["noticed_s"] is None and action is ChaosAction.RESTORE:
        print_line(f"the gateway does not route to it yet (state {result['state']}); {serving}")
    elif result["noticed_s"] is None:
        print_line(
            f"the gateway has not taken it out of rotation so far; {serving}. "
            "It detects a hanging engine only when a request waits for it"
        )
    elif action is ChaosAction.RESTORE:
        print_line(f"the gateway routes to it again after {result['noticed_s']:.1f} s; {serving}")
    else:
        print_line(
            f"the gateway took it out of rotation after {result['noticed_s']:.1f} s "
            f"({result['cause']}); {serving}"
        )

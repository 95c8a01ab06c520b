"""`penstock chaos`: break a mock TP group on purpose, see what the gateway makes of it, and heal it.

Lives here: which faults each word means, and telling what came of it. Not here: what a fault does (mockgpu). Only a
mock that was started with a door for it can be broken, and only from its own machine: the address comes from the
endpoint's label `chaos` and must be a loopback one; a real engine has none.
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

import typer

from gateway.cli.admin_client import AdminAddress, Server, with_admin_options
from gateway.cli.output import Json, fail, print_json, say
from gateway.util.units import duration_s

LABEL = "chaos"
PATIENCE_S, HEALING_S = 10.0, 60.0  # the longer an endpoint is out, the longer until it is asked again
LOOK_EVERY_S = 0.05
SETTLE_S = 0.6
ANSWER_CAP_BYTES = 1 << 16


class Action(StrEnum):
    """What can be done to a group."""

    KILL = "kill"
    FREEZE = "freeze"
    SLOW = "slow"
    LOSE_RANK = "lose-rank"
    PARTITION = "partition"
    RESTORE = "restore"


class Only(StrEnum):
    """What a slow group is slow at: steps with prompt tokens, or those without."""

    PREFILL = "prefill"
    DECODE = "decode"


DONE: Mapping[Action, str] = MappingProxyType(
    {
        Action.KILL: "killed",
        Action.FREEZE: "froze",
        Action.SLOW: "slowed down",
        Action.LOSE_RANK: "took a GPU from",
        Action.PARTITION: "cut off",
        Action.RESTORE: "restored",
    }
)
UNSEEN = frozenset({Action.SLOW})
"""What health checks do not see."""

For = Annotated[str | None, typer.Option("--for", metavar="TIME", help="Heal it by itself after this long, as in 10s.")]


@with_admin_options
def chaos(
    admin: AdminAddress,
    action: Annotated[Action, typer.Argument(help="What to do to it.")],
    target: Annotated[list[str] | None, typer.Argument(help="Names of endpoints; restore: all unless given.")] = None,
    factor: Annotated[float, typer.Option("--factor", min=0.01, help="slow: so many times as slow.")] = 10.0,
    only: Annotated[Only | None, typer.Option("--only", help="slow: at these steps alone.")] = None,
    rank: Annotated[int, typer.Option("--rank", min=0, help="lose-rank: which GPU.")] = 0,
    hang: Annotated[bool, typer.Option("--hang", help="lose-rank: the others wait for it and tell nobody.")] = False,
    lasting: For = None,
    as_json: Json = False,
) -> None:
    """Break a mock TP group of the demo, see what the gateway makes of it, and heal it."""
    server = Server(admin, None)
    fleet = {each["name"]: each for each in server.ask("GET", "/endpoints")["endpoints"]}
    names = list(target or (name for name in fleet if action is Action.RESTORE and LABEL in fleet[name]["labels"]))
    if not names and action is Action.RESTORE:
        fail(
            f"the gateway has no mock that may be broken: no endpoint has a label {LABEL!r}, as `penstock demo`'s have"
        )
    if not names:
        raise typer.BadParameter("name an endpoint: " + (", ".join(fleet) or "the gateway has none"))
    spec = _spec(action, _slow(factor, only), rank, hang, None if lasting is None else _lasting_s(lasting))
    doors = {name: _door(name, fleet) for name in names}
    before = server.ask("GET", "/live")["totals"]["since_start"]
    told = [_break(server, name, door, spec, action) for name, door in doors.items()]
    if action is Action.RESTORE and not target:  # of all, only those that were broken
        told = [each for each in told if each["before"]]
    if action is not Action.RESTORE:
        time.sleep(SETTLE_S)  # the live view is made twice a second
    after = server.ask("GET", "/live")["totals"]["since_start"]
    came = {key: after[key] - before[key] for key in ("failed", "retries")}
    if as_json:
        print_json({"action": action, "spec": spec, "targets": told, "since": came})
        return
    if not told:
        say("nothing is broken")
    for each in told:
        _tell(each, action)
    if action is not Action.RESTORE and any(came.values()):
        say(f"{came['retries']} requests were tried again elsewhere, {came['failed']} broke off or failed")


def _slow(factor: float, only: Only | None) -> str:
    return f"slow:x={factor:g}" + (f":{only}" if only is not None else "")


def _spec(action: Action, slow: str, rank: int, hang: bool, lasting_s: float | None) -> str:
    """The faults in mockgpu's grammar. A killed group loses its cache as well, as a process that ends does."""
    faults = {
        Action.KILL: ("refuse", "lost-rank"),
        Action.FREEZE: ("freeze",),
        Action.SLOW: (slow,),
        Action.LOSE_RANK: (f"lost-rank:rank={rank}" + (":hang" if hang else ""),),
        Action.PARTITION: ("partition",),
        Action.RESTORE: (),
    }[action]
    window = "" if lasting_s is None else f"@0-{lasting_s:g}"
    return ",".join(f"{fault}{window}" for fault in faults)


def _lasting_s(text: str) -> float:
    try:
        return duration_s(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--for") from None


def _door(name: str, fleet: Mapping[str, Any]) -> tuple[str, int]:
    """Where faults of this endpoint may be set. Ends the command when there is no such place."""
    if name not in fleet:
        raise typer.BadParameter(f"no endpoint is called {name!r}; there are {', '.join(fleet)}")
    door = fleet[name]["labels"].get(LABEL)
    if door is None:
        fail(f"{name} is no mock that may be broken: it has no label {LABEL!r}, as `penstock demo` gives its own")
    host, _, port = door.rpartition(":")
    try:
        address, number = ip_address(host), int(port)
    except ValueError:
        fail(f"the label {LABEL!r} of {name} is not ADDRESS:PORT: {door!r}")
    if not address.is_loopback:
        fail(f"the label {LABEL!r} of {name} names another machine, {door}: mocks are broken from their own")
    return str(address), number


def _break(server: Server, name: str, door: tuple[str, int], spec: str, action: Action) -> dict[str, Any]:
    """Set the fault, and wait for the gateway to see it."""
    url = _find(server, name)["url"]
    answer = _post(door, f"/faults/{urlsplit(url).port}", {"spec": spec}, name)
    began, wanted = time.monotonic(), action is Action.RESTORE
    patience_s = HEALING_S if wanted else PATIENCE_S
    seen: dict[str, Any] = _find(server, name)
    while action not in UNSEEN and seen["available"] != wanted and time.monotonic() - began < patience_s:
        time.sleep(LOOK_EVERY_S)
        seen = _find(server, name)
    noticed = action not in UNSEEN and seen["available"] == wanted
    fleet = server.ask("GET", "/endpoints")["endpoints"]
    return {
        "name": name,
        "url": url,
        "before": answer["before"],
        "requests": answer["jobs"],
        "noticed_s": round(time.monotonic() - began, 2) if noticed else None,
        "state": seen["state"],
        "cause": seen["cause"],
        "serving": sum(each["available"] for each in fleet),
        "endpoints": len(fleet),
    }


def _find(server: Server, name: str) -> dict[str, Any]:
    fleet = server.ask("GET", "/endpoints")["endpoints"]
    found: dict[str, Any] | None = next((each for each in fleet if each["name"] == name), None)
    if found is None:
        fail(f"{name} has left the configuration meanwhile")
    return found


def _post(door: tuple[str, int], path: str, body: Mapping[str, object], name: str) -> dict[str, Any]:
    connection = http.client.HTTPConnection(*door, timeout=5.0)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        told: dict[str, Any] = json.loads(answer.read(ANSWER_CAP_BYTES))
    except (OSError, http.client.HTTPException, ValueError) as error:
        fail(f"nobody sets faults of {name} at {door[0]}:{door[1]}: {error}; was its mock started with --chaos-port?")
    finally:
        connection.close()
    if answer.status != 200:
        fail(f"the mock of {name} refused: {told.get('error', answer.status)}")
    return told


def _tell(each: Mapping[str, Any], action: Action) -> None:
    there = f"; {each['requests']} requests were there" if action is not Action.RESTORE else ""
    say(f"{DONE[action]} {each['name']} ({each['url']}){there}", style="yellow" if there else "green")
    share = f"{each['serving']} of {each['endpoints']} endpoints serve"
    if action in UNSEEN:
        say("its health checks go on as before; policies see it in its answers")
    elif each["noticed_s"] is None and action is Action.RESTORE:
        say(f"the gateway does not ask it yet (state {each['state']}); {share}")
    elif each["noticed_s"] is None:
        say(f"the gateway has not taken it out so far; {share}. An engine that hangs is missed by who waits for it")
    elif action is Action.RESTORE:
        say(f"the gateway asks it again after {each['noticed_s']:.1f} s; {share}")
    else:
        say(f"the gateway took it out after {each['noticed_s']:.1f} s ({each['cause']}); {share}")

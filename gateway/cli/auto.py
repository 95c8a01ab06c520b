"""The command `penstock auto`: shows how pools choose policies, and pins a pool to a policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any
from urllib.parse import quote

from command_line import Argument
from gateway.cli.admin_client import AdminAddress, AdminClient, KeyFileOption, with_admin_options
from gateway.cli.shared_options import JsonOption
from gateway.cli.terminal_output import exit_with_error, print_json, print_line


class AutoAction(StrEnum):
    """The actions of the command `penstock auto`, such as pinning a policy."""

    STATUS = "status"
    PIN = "pin"
    UNPIN = "unpin"


@with_admin_options
def auto(
    admin: AdminAddress,
    action: Annotated[
        AutoAction, Argument(help="What to do: show the pools, pin a pool's policy, or unpin it.")
    ] = AutoAction.STATUS,
    pool: Annotated[
        str | None,
        Argument(help="Name of the pool; required if several pools have the section auto."),
    ] = None,
    key_file: KeyFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how pools with the section `auto` choose their routing policy, or pin a policy.

    A pinned pool keeps its policy; comparisons then only recommend another one. Unpin to permit
    changes again.
    """
    server = AdminClient(admin, key_file)
    reply = server.request("GET", "/auto")
    if action is not AutoAction.STATUS:
        names = [row["pool"] for row in reply["pools"]]
        if pool is None and len(names) != 1:
            exit_with_error(f"name one of the pools: {', '.join(names) or 'none has auto'}")
        path = f"/auto/{quote(pool or names[0], safe='')}/{action}"
        changed = server.request("POST", path)
        if changed["result"] not in ("applied", "unchanged"):
            exit_with_error(changed["message"])
        if as_json:
            print_json(changed)
        else:
            print_line(changed["message"], style="green")
        return
    if as_json:
        print_json(reply)
        return
    for row in reply["pools"]:
        if pool in (None, row["pool"]):
            for line in pool_lines(row):
                print_line(line)
    if not reply["pools"]:
        print_line("no pool of the configuration has the section auto")


def pool_lines(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines of text about the state of one pool with automatic policy selection."""
    mode = "pinned" if row["pinned"] else row["mode"]
    yield f"pool {row['pool']}: {row['policy']} (auto, {mode})"
    if row["held"]:
        yield f"  held       {row['held']}; `penstock auto unpin` permits changes again"
    if row["trouble"]:
        yield f"  waits      {row['trouble']}"
    if row["failure"]:
        yield f"  failed     {row['failure']}"
    decision, estimate = row["decision"], row["estimate"]
    if decision is None or estimate is None:
        yield "  compared   not yet"
    else:
        yield f"  compared   {_time(row['compared_at'])}, {estimate['requests']} requests"
        yield f"  decided    {decision['action']}: {decision['reason']}"
        for member in estimate["members"]:
            gain = "" if member["member"] == estimate["incumbent"] else _gain(member)
            yield f"    {member['member']}: {member['goodput']:.1%} good{gain}"
    for switch in row["switches"]:
        change = f"{switch['before']} -> {switch['after']}"
        yield f"  v{switch['version']}  {_time(switch['at_s'])}  {change}: {switch['reason']}"


def _gain(member: Mapping[str, Any]) -> str:
    return f", {100 * member['gain']:+.1f} points (error {100 * member['error']:.1f})"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")

"""The command `penstock mirror`, which shows whether candidate engines answer as well as live ones.

Exit codes: 0 no mirror is worse than chance explains, 1 the gateway is not reachable, 2 wrong
usage, 3 at least one mirror is worse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gateway.cli.admin_client import AdminAddress, AdminClient, with_admin_options
from gateway.cli.shared_options import JsonOption
from gateway.cli.terminal_output import print_json, print_line


@with_admin_options
def mirror(admin: AdminAddress, as_json: JsonOption = False) -> None:
    """Show whether candidate engines answer live requests as well as the pools' own engines."""
    reply = AdminClient(admin, None).request("GET", "/mirror")
    rows: list[dict[str, Any]] = reply["mirrors"]
    if as_json:
        print_json(reply)
    elif not rows:
        print_line("no pool has a mirror; add pools.NAME.mirror to the configuration")
    else:
        for row in rows:
            for line in mirror_lines(row):
                print_line(line)
    raise SystemExit(3 if any(row["last"] and row["last"]["is_worse"] for row in rows) else 0)


def mirror_lines(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines of text about the results of one pool's mirror.

    A mirror sends a share of live requests to candidate engines too, and compares the answers.
    """
    counts = ", ".join(f"{count} {result}" for result, count in sorted(row["requests"].items()))
    yield f"pool {row['pool']} -> {row['to']}: {counts or 'no request yet'}; {row['tokens']} tokens"
    report = row["last"] or row["open"]
    if report is None:
        return
    yield f"{'measure':<28}{'base again':>12}{'candidate':>12}{'worse by':>12}{'+-':>10}"
    for each in report["measures"]:
        mark = "  WORSE" if row["last"] and each["is_worse"] else ""
        yield (
            f"{each['name']:<28}{each['floor']:>12.4f}{each['candidate']:>12.4f}"
            f"{each['worse_by']:>12.4f}{each['error']:>10.4f}{mark}"
        )
    if row["last"] is None:
        yield f"{report['prompts']} of {row['block_size']} requests: too few to judge"
    elif report["is_worse"]:
        yield f"worse than the base in the last {report['prompts']} requests"
    else:
        yield f"no worse than the base differs from itself: {report['prompts']} requests"

"""The command `penstock status`: prints the state of a running gateway, from its admin server.

It prints the configuration's version and problems, the number of available endpoints, policies on
trial, and workload drift. Exit codes: 0 success, 1 not reachable, 2 wrong usage.
"""

from __future__ import annotations

from typing import Any

from gateway.cli.admin_client import AdminAddress, AdminClient, with_admin_options
from gateway.cli.shared_options import JsonOption
from gateway.cli.terminal_output import print_json, print_line

# Members of the reply to GET /config that `penstock status --json` prints.
_STATUS_MEMBERS = (
    *("version", "applied", "file_differs", "last_error", "needs_restart"),
    *("models", "shared", "certificates", "unlisted", "unserved"),
)


@with_admin_options
def status(admin: AdminAddress, as_json: JsonOption = False) -> None:
    """Show a running gateway's configuration version, its last error, and its endpoints."""
    server = AdminClient(admin, None)
    config = server.request("GET", "/config")
    fleet = server.request("GET", "/endpoints")["endpoints"]
    shadows = server.request("GET", "/shadow")["shadows"]
    canaries = server.request("GET", "/canary")["canaries"]
    drift = server.request("GET", "/drift")["pools"]
    if as_json:
        reply = {key: config[key] for key in _STATUS_MEMBERS}
        trials = {"shadows": shadows, "canaries": canaries, "drift": drift}
        print_json(reply | {"endpoints": fleet} | trials)
        return
    _print_version(config["applied"], fleet)
    _print_shared(config["shared"])
    _print_problems(config)
    _print_trials(shadows, canaries)
    _print_drift(drift)


def _print_version(applied: dict[str, Any], fleet: list[dict[str, Any]]) -> None:
    up = sum(row["available"] for row in fleet)
    origin = f"{applied['source']}, {applied['at']}, {applied['hash']}"
    print_line(f"v{applied['version']} {applied['file']} ({origin})")
    in_flight = sum(row["in_flight"] for row in fleet)
    print_line(f"{up} of {len(fleet)} endpoints available, {in_flight} requests in flight")


def _print_problems(config: dict[str, Any]) -> None:
    # Print one line for each problem on which an operator may have to act.
    if config["file_differs"]:
        print_line(
            "the file differs from the running configuration; "
            "`penstock diff` shows the changes, `penstock reload` applies them",
            style="yellow",
        )
    if config["needs_restart"]:
        print_line(
            f"takes effect after a restart: {', '.join(config['needs_restart'])}", style="yellow"
        )
    for row in config["certificates"]:
        if row["problem"] is not None:
            print_line(f"{row['path']}: {row['file']} {row['problem']}", style="red")
    for name, message in config["unlisted"].items():
        print_line(f"requests for model {name} get 404: {message}", style="red")
    for name, text in config["unserved"].items():
        print_line(f"requests for model {name} get 503: {text} that lists it", style="red")
    error = config["last_error"]
    for problem in error["problems"] if error else ():
        print_line(
            f"last reload rejected ({error['source']}, {error['at']}): {problem['text']}",
            style="red",
        )


def _print_shared(shared: dict[str, Any] | None) -> None:
    if shared is None:
        return
    if shared["problem"]:
        print_line(
            f"Redis is not usable: {shared['problem']}; this gateway runs without shared state",
            style="red",
        )
    elif shared["connected"]:
        others = shared["gateways"]
        print_line(
            f"shares state with {others} other gateway{'' if others == 1 else 's'} through Redis"
        )


def _print_trials(shadows: list[dict[str, Any]], canaries: list[dict[str, Any]]) -> None:
    for pool in shadows:
        for trial in pool["policies"]:
            line = f"shadow {trial['policy']} of pool {pool['pool']}: "
            line += f"{pool['scored']} of {pool['picks']} picks scored"
            if not trial.get("conclusive"):
                compared = trial.get("agreed", 0) + trial.get("differed", 0)
                line += f"; {compared} compared, too few to judge"
            elif trial.get("agreement") is not None:
                line += f", agrees with {trial['agreement']:.1%}, would gain "
                line += f"{1e3 * trial['ttft_gain_s']:+.1f} ms to the first token and "
                line += f"{trial['cached_tokens_gain']:+.0f} cached tokens, "
                line += f"takes {trial['cost_us']:.0f} us"
            print_line(f"{line}, {trial['failed']} failed" if trial.get("failed") else line)
    for pool in canaries:
        for trial in pool["arms"]:
            line = f"{trial['arm']} {trial['policy']} of pool {pool['pool']}: "
            line += f"{trial['requests']} requests"
            if trial.get("goodput") is not None:
                line += (
                    f", {trial['goodput']:.1%} goodput, "
                    f"{trial['failed']} failed, {trial['shed']} rejected"
                )
            if trial.get("ttft_p50_s") is not None:
                line += f", TTFT p50 {trial['ttft_p50_s']:g} s"
            if trial.get("ttft_p99_s") is not None:
                line += f", p99 {trial['ttft_p99_s']:g} s"
            print_line(f"{line} (canary: {pool['share']})")


def _print_drift(pools: list[dict[str, Any]]) -> None:
    for row in pools:
        window = row["window"]
        if window is None:
            text = "no window of 100 requests has ended yet"
        else:
            text = ", ".join(f"{name} {index:.2f}" for name, index in window["index"].items())
            text += f" (PSI against sized_for, {window['requests']} requests"
            ratio = window["rate_ratio"]
            text += ")" if ratio is None else f", {ratio:.0%} of the usual rate)"
        verdict = f"since {row['since']}" if row["drift"] else "none"
        style = "yellow" if row["drift"] else ""
        print_line(f"drift of pool {row['pool']}: {verdict}; {text}", style=style)

"""The command `penstock plan`: compares a new configuration with the running one by a replay.

The planner is imported only when the command runs. Exit codes: 0 success, 1 no result, 2 wrong
usage, 3 the new configuration is worse than --fail-if-worse allows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from command_line import Argument, Option, UsageError, write_line
from gateway.cli.admin_client import AdminAddress, AdminClient, with_admin_options
from gateway.cli.check import exit_with_problems
from gateway.cli.shared_options import JsonOption
from gateway.cli.terminal_output import exit_with_error

RunningFileOption = Annotated[
    Path | None,
    Option(
        "--running",
        help="Configuration file to compare with; default: the running configuration, "
        "requested from --admin.",
    ),
]
FailIfWorseOption = Annotated[
    float | None,
    Option(
        "--fail-if-worse",
        min=0,
        metavar="POINTS",
        help="Exit with status 3 if the new configuration lowers a pool's goodput by more than "
        "this many percentage points.",
    ),
]
LastOption = Annotated[
    str,
    Option(
        "--last",
        metavar="TIME",
        help="Length of the period to replay, at the end of the access log; for example 1h.",
    ),
]
LogOption = Annotated[
    Path | None,
    Option(
        "--log",
        help="Path of the access log to replay; default: the one of the running gateway.",
    ),
]
PlanModelOption = Annotated[
    str | None,
    Option("--model", help="Model for the simulated engines, as in `penstock mock`."),
]
PlanGpuOption = Annotated[
    str | None,
    Option("--gpu", help="GPU type of endpoints without a `gpu` label, for example h100."),
]


@with_admin_options
def plan(
    admin: AdminAddress,
    file: Annotated[Path, Argument(help="New configuration file to evaluate.")],
    last: LastOption = "10m",
    log: LogOption = None,
    running: RunningFileOption = None,
    model: PlanModelOption = None,
    gpu: PlanGpuOption = None,
    fail_if_worse: FailIfWorseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compare a new configuration with the running one on the recent access log.

    The log's requests are replayed through simulated engines under both configurations.
    """
    from gateway.config import ConfigError
    from planner.plan import Assumptions, PoolCaseError, as_plain, cases, recent, show
    from planner.plan import plan as planned
    from planner.traces import TraceError

    seconds = _parse_last(last)
    try:
        candidate = _config_as_json(file)
        if running is not None:
            running_config = _config_as_json(running)
        else:
            running_config = AdminClient(admin, None).request("GET", "/config")["config"]
        defaults = Assumptions(model, gpu)
        outcome = planned(
            cases(running_config, defaults),
            cases(candidate, defaults),
            recent(log or _access_log_file(running_config), seconds),
        )
    except ConfigError as error:
        exit_with_problems(error, as_json=as_json)
    except (PoolCaseError, TraceError) as error:
        exit_with_error(str(error))
    if as_json:
        write_line(msgspec.json.format(msgspec.json.encode(as_plain(outcome)), indent=2).decode())
    else:
        show(outcome)
    worst = min((pool.gain for pool in outcome.pools), default=0.0)
    if fail_if_worse is not None and worst < -fail_if_worse / 100:
        raise SystemExit(3)


def _parse_last(text: str) -> float:
    from gateway.util.durations_and_sizes import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise UsageError(f"--last: {error}") from None


def _config_as_json(file: Path) -> dict[str, Any]:
    # Return a configuration file in the form of GET /config. Raises ConfigError.
    from gateway.config import load_with_warnings

    return load_with_warnings(file, os.environ).config.model_dump(mode="json", by_alias=True)


def _access_log_file(config: Mapping[str, Any]) -> Path:
    # Return the path of the running gateway's access log.
    #
    # Prints a message and exits with status 1 when the log is not a file.
    target = str(config["observability"]["access_log"])
    if target in ("off", "stdout"):
        exit_with_error(f"the gateway's access log is {target!r}; name a file with --log")
    return Path(target)

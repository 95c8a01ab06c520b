"""The command `penstock drift`: compares a log with `sized_for` of a configuration, or prints it.

The section `sized_for` contains the request shapes that a fleet was sized for. Exit status:

- 0: no drift
- 2: wrong input
- 3: drift
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from command_line import Argument, Option, write_line
from planner.drift.access_log_requests import read_log
from planner.drift.request_measures import count_shapes, windows_of
from planner.progress_bar import progress_bar
from planner.size.units import parse_seconds
from planner.traces import TraceError, TraceRequest
from policies.sizing.workload_drift import BINS, LIMIT, MEASURES, DriftWatch, DriftWindow

Log = Annotated[
    Path,
    Argument(
        is_file=True, help="Access log or recorded trace whose requests are checked for drift."
    ),
]
ConfigFile = Annotated[
    Path | None,
    Option(
        "--config",
        "-c",
        help="Configuration with a section sized_for to compare with. Without it, the command "
        "prints a sized_for for the log.",
    ),
]
Pool = Annotated[
    str | None,
    Option("--pool", help="Name of the pool in the configuration. Default: the only pool."),
]
Only = Annotated[
    list[str] | None,
    Option(
        "--only",
        metavar="MODEL",
        help="Count only requests of the access log for this model; may be repeated. Default: "
        "with --config the models of the pool, otherwise all.",
    ),
]
Replay = Annotated[
    bool,
    Option(
        "--replay/--no-replay",
        help=(
            "If there is drift, replay the newest requests on the running fleet and on a newly "
            "sized one."
        ),
    ),
]
Last = Annotated[
    str,
    Option(
        "--last",
        metavar="TIME",
        help="Replay the requests of this period before the end of the log, for example 30m.",
    ),
]
Model = Annotated[
    str | None,
    Option(
        "--model",
        help=("Model of the replayed engines, if the configuration contains no known model name."),
    ),
]
GpuKind = Annotated[
    str | None,
    Option(
        "--gpu", help=("GPU type of the replayed engines, if their endpoints have no label gpu.")
    ),
]
Reload = Annotated[
    str | None,
    Option(
        "--reload",
        metavar="TIME",
        help="Time that an engine needs to load its weights. Default: at 2 GB/s per GPU.",
    ),
]
Limit = Annotated[
    str, Option("--limit", metavar="TIME", help="Maximum CPU time of the replays, for example 60s.")
]
AsJson = Annotated[bool, Option("--json", help="Print the result as JSON instead of text.")]


ConfigReader = Callable[[str], Mapping[str, Any]]


class DriftError(ValueError):
    """Raised if a log cannot be compared with `sized_for`. The message contains what is valid."""


class ReplayOptions(msgspec.Struct, frozen=True):
    """The options of `penstock drift` for suggesting another layout.

    last_s    seconds of recent requests to replay
    model     the model, if the configuration does not contain it; None: none given
    gpu       the GPU type, if the configuration does not contain it; None: none given
    reload_s  seconds in which one engine reloads; None: from the size of its weights
    limit_s   maximum CPU seconds of the replays
    """

    last_s: float
    model: str | None
    gpu: str | None
    reload_s: float | None
    limit_s: float


def drift(
    read_config: ConfigReader,
    log: Log,
    config: ConfigFile = None,
    pool: Pool = None,
    only: Only = None,
    replay: Replay = True,
    last: Last = "60m",
    model: Model = None,
    gpu: GpuKind = None,
    reload: Reload = None,
    limit: Limit = "5m",
    as_json: AsJson = False,
) -> None:
    """Show whether recorded requests still have the shapes that a pool was sized for.

    If not, replays can show whether another layout is worth a switch.
    """
    try:
        options = ReplayOptions(
            parse_seconds(last),
            *(model, gpu, None if reload is None else parse_seconds(reload)),
            parse_seconds(limit),
        )
        data = None if config is None else _read_yaml(config)
        name = pool if data is None else pool_of(data, pool)
        models = only or (None if data is None else models_of(data, name or ""))
        begin_s, requests = read_log(log, models)
        if data is None:
            write_line(_block(requests, begin_s, name or "main"))
            return
        shares, rates = sized_for_of(data, name or "")
    except (TraceError, DriftError, ValueError) as error:
        text = str(error) if config is None else f"{config}: {error}"
        write_line(f"penstock drift: {text}", err=True)
        raise SystemExit(2) from None
    watch = DriftWatch(shares, rates, begin_s)
    windows = list(windows_of(requests, watch, begin_s))
    alarm = next((window for window in windows if window.is_alarm), None)
    advice: dict[str, Any] | None = None
    lines: list[str] = []
    if alarm is not None and replay and config is not None:
        advice, lines = _suggestion(
            read_config, config, name or "", requests, options, log, as_json
        )
    if as_json:
        plain = {
            "drift": alarm is not None,
            "windows": msgspec.to_builtins(windows),
            "suggestion": advice,
        }
        write_line(json.dumps(plain, indent=2))
    else:
        write_line("\n".join([*_lines(windows, alarm, begin_s), *lines]))
    raise SystemExit(0 if alarm is None else 3)


def _suggestion(
    read_config: ConfigReader,
    config: Path,
    pool: str,
    requests: Sequence[TraceRequest],
    options: ReplayOptions,
    log: Path,
    is_quiet: bool,
) -> tuple[dict[str, Any], list[str]]:
    # Return the suggested layout as plain values, and as lines of text.
    #
    # The modules that compute it are imported only here, because they are needed only after drift.
    from planner.drift.layout_change import SuggestionError, SuggestionInput, suggest
    from planner.plan.config_to_replay import Assumptions

    from_s = requests[-1].arrival_s - options.last_s
    newest = [request for request in requests if request.arrival_s >= from_s]
    try:
        plain = _plain_config(read_config, config)
        given = SuggestionInput(
            *(plain, pool, newest, Assumptions(options.model, options.gpu), read_config),
            *(options.reload_s, options.limit_s),
        )
        with progress_bar(is_quiet) as show_progress:
            found = suggest(given, show_progress)
    except (SuggestionError, OSError, ValueError) as error:
        return {"error": str(error)}, [f"no suggestion: {error}"]
    lines = [f"{'fleet':<40}{'GPUs':>6}{'$/hour':>9}{'served in time':>15}"]
    for title, fleet in (("now", found.running), ("best", found.best)):
        label = f"{title}: {fleet.fleet}"
        lines.append(f"{label:<40}{fleet.gpus:>6}{fleet.usd_hour:>9.2f}{fleet.attainment:>15.1%}")
    verdict = "switch" if found.is_suggested else "keep the running fleet"
    lines.append(f"suggestion: {verdict}; {found.reason}")
    if found.is_suggested:
        lines.append(f"the plan and its files: penstock size MODEL --from {log}")
    return msgspec.to_builtins(found), lines


def _plain_config(read_config: ConfigReader, file: Path) -> Mapping[str, Any]:
    # Catch every exception: the reader's errors are classes of the gateway's package, which is not
    # imported here.
    try:
        return read_config(file.read_text())
    except Exception as error:
        raise DriftError(f"{file}: {error}") from None


def _block(requests: Sequence[TraceRequest], begin_s: float, pool: str) -> str:
    rates = hourly_rates([begin_s + request.arrival_s for request in requests])
    shares = count_shapes(requests).shares() | {"hourly_rates": rates}
    lines = [f"    {name}: [{', '.join(f'{v:g}' for v in shares[name])}]" for name in shares]
    return "\n".join(["sized_for:", f"  {pool}:", *lines])


def hourly_rates(times_s: Sequence[float]) -> list[float]:
    """Return the requests per second in each hour of the day (UTC), 24 numbers.

    `times_s` are the arrival times in Unix seconds, ascending. For an hour that the log covers in
    part, only that part counts. An hour that it does not cover has the rate 0.
    """
    counts, seconds = [0] * 24, [0.0] * 24
    for at_s in times_s:
        counts[int(at_s // 3600) % 24] += 1
    at_s, end_s = (times_s[0], times_s[-1]) if times_s else (0.0, 0.0)
    while at_s < end_s:
        next_s = min(end_s, (at_s // 3600 + 1) * 3600)
        seconds[int(at_s // 3600) % 24] += next_s - at_s
        at_s = next_s
    return [
        round(count / covered_s, 4) if covered_s else 0.0
        for count, covered_s in zip(counts, seconds, strict=True)
    ]


def _read_yaml(file: Path) -> dict[str, Any]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        data = YAML(typ="safe", pure=True).load(file.read_text())
    except (YAMLError, OSError, UnicodeDecodeError) as error:
        raise DriftError(str(error)) from None
    return data if isinstance(data, dict) else {}


def pool_of(data: Mapping[str, Any], pool: str | None) -> str:
    """Return the name of the pool whose traffic is checked for drift.

    data  the configuration, whose section `sized_for` has the expected traffic by pool
    pool  the name that the user gave; None: the only pool of that section

    Raises DriftError if there is no such pool, or if there are several.
    """
    blocks = data.get("sized_for")
    if not isinstance(blocks, dict) or not blocks:
        raise DriftError(
            "the configuration has no section sized_for; to get one, run `penstock drift LOG` "
            "and insert its output"
        )
    name = pool or (next(iter(blocks)) if len(blocks) == 1 else "")
    if not isinstance(blocks.get(name), dict):
        raise DriftError(
            f"sized_for has no pool {name!r}; its pools: {', '.join(map(str, blocks))}"
        )
    return str(name)


def models_of(data: Mapping[str, Any], pool: str) -> list[str] | None:
    """Return the models of a pool; None: the configuration does not list its models."""
    models = data.get("models")
    if not isinstance(models, list) or not models:
        return None
    return [
        str(model.get("name"))
        for model in models
        if isinstance(model, dict) and model.get("pool") == pool
    ]


def sized_for_of(
    data: Mapping[str, Any], pool: str
) -> tuple[Mapping[str, Sequence[float]], Sequence[float]]:
    """Return the traffic that a pool was sized for: shares of requests by size, and hourly rates.

    Both are in the section `sized_for` of the configuration. Raises DriftError if they are invalid.
    """
    block = data["sized_for"][pool]
    return {key: _numbers(block, key, BINS[key]) for key in MEASURES}, (
        _numbers(block, "hourly_rates", 24) if block.get("hourly_rates") else ()
    )


def _numbers(block: Mapping[str, Any], name: str, count: int) -> list[float]:
    values = block.get(name)
    if not isinstance(values, list) or len(values) != count:
        raise DriftError(f"sized_for.{name} must be a list of {count} numbers")
    if not all(isinstance(value, int | float) and value >= 0 for value in values):
        raise DriftError(f"sized_for.{name} must contain only numbers of at least 0")
    return [float(value) for value in values]


def _lines(
    windows: Sequence[DriftWindow], alarm: DriftWindow | None, begin_s: float
) -> Iterator[str]:
    yield f"{'ends after':>10} {'requests':>9} {'rate':>6} " + "".join(f"{m:>10}" for m in MEASURES)
    for window in windows:
        rate = "-" if window.rate_ratio is None else f"{window.rate_ratio:.0%}"
        shown = [window.index.get(name) for name in MEASURES]
        cells = "".join(f"{'-' if index is None else f'{index:.2f}':>10}" for index in shown)
        mark = "  DRIFT" if window.is_alarm else ""
        minutes = (window.ends_s - begin_s) / 60
        yield f"{minutes:>6.0f} min {window.requests:>9} {rate:>6} {cells}{mark}"
    if alarm is None:
        yield f"no drift: no measure is above {LIMIT} in two windows in succession"
        return
    minutes = (alarm.ends_s - begin_s) / 60
    yield f"drift of {', '.join(alarm.alarms)} after {minutes:.0f} minutes"

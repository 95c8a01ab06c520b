"""The command `penstock drift`: compares a log with `sized_for` of a configuration, or prints it.

Exit status: 0 no drift; 2 wrong input; 3 drift.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from planner.drift.shapes import count_shapes, windows_of
from planner.traces import TraceError, TraceRequest, read_trace
from policies.sizing.drift import BINS, LIMIT, MEASURES, DriftWatch, DriftWindow

Log = Annotated[
    Path, typer.Argument(exists=True, dir_okay=False, help="Access log or recorded trace to check.")
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        help="Configuration that contains sized_for; without it, the command prints a "
        "sized_for for the log.",
    ),
]
Pool = Annotated[
    str | None,
    typer.Option("--pool", help="Name of the pool in the configuration; default: the only pool."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


class DriftError(ValueError):
    """Raised when a comparison with `sized_for` is impossible; the message says what is valid."""


def drift(log: Log, config: ConfigFile = None, pool: Pool = None, as_json: AsJson = False) -> None:
    """Show whether recorded requests still have the shapes that a pool was sized for."""
    try:
        requests = sorted(read_trace(log), key=lambda request: request.arrival_s)
        if config is None:
            typer.echo(_block(requests, pool or "main"))
            return
        watch = DriftWatch(*read_sized_for(config, pool))
    except (TraceError, DriftError) as error:
        typer.echo(f"penstock drift: {error}", err=True)
        raise typer.Exit(2) from None
    windows = list(windows_of(requests, watch))
    alarm = next((window for window in windows if window.is_alarm), None)
    if as_json:
        plain = {"drift": alarm is not None, "windows": msgspec.to_builtins(windows)}
        typer.echo(json.dumps(plain, indent=2))
    else:
        typer.echo("\n".join(_lines(windows, alarm, log)))
    raise typer.Exit(0 if alarm is None else 3)


def _block(requests: Sequence[TraceRequest], pool: str) -> str:
    rates = [0.0] * 24
    if requests:
        hours = max(1.0, (requests[-1].arrival_s - requests[0].arrival_s) / 3600)
        for request in requests:
            rates[int(request.arrival_s // 3600) % 24] += 1
        days = max(1.0, hours / 24)
        rates = [round(count / 3600 / days, 4) for count in rates]
    shares = count_shapes(requests).shares() | {"hourly_rates": rates}
    lines = [f"    {name}: [{', '.join(f'{v:g}' for v in shares[name])}]" for name in shares]
    return "\n".join(["sized_for:", f"  {pool}:", *lines])


def read_sized_for(
    file: Path, pool: str | None
) -> tuple[Mapping[str, Sequence[float]], Sequence[float]]:
    """Return the shares of requests and the hourly rates in a pool's `sized_for`.

    Raises DriftError.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        data = YAML(typ="safe", pure=True).load(file.read_text())
    except (YAMLError, OSError, UnicodeDecodeError) as error:
        raise DriftError(f"{file}: {error}") from None
    blocks = data.get("sized_for") if isinstance(data, dict) else None
    if not isinstance(blocks, dict) or not blocks:
        raise DriftError(
            f"{file} has no section sized_for; `penstock drift LOG` prints one that can be inserted"
        )
    name = pool or (next(iter(blocks)) if len(blocks) == 1 else "")
    block = blocks.get(name)
    if not isinstance(block, dict):
        raise DriftError(
            f"sized_for has no pool {name!r}; its pools: {', '.join(map(str, blocks))}"
        )
    return {key: _numbers(block, key, BINS[key]) for key in MEASURES}, (
        _numbers(block, "hourly_rates", 24) if block.get("hourly_rates") else ()
    )


def _numbers(block: Mapping[str, Any], name: str, count: int) -> list[float]:
    values = block.get(name)
    if not isinstance(values, list) or len(values) != count:
        raise DriftError(f"sized_for.{name} must be a list of {count} numbers")
    if not all(isinstance(value, int | float) and value >= 0 for value in values):
        raise DriftError(f"sized_for.{name} must not contain negative numbers")
    return [float(value) for value in values]


def _lines(windows: Sequence[DriftWindow], alarm: DriftWindow | None, log: Path) -> Iterator[str]:
    yield f"{'ends after':>10} {'requests':>9} {'rate':>6} " + "".join(f"{m:>10}" for m in MEASURES)
    for window in windows:
        rate = "-" if window.rate_ratio is None else f"{window.rate_ratio:.0%}"
        cells = "".join(f"{window.index[name]:>10.2f}" for name in MEASURES)
        mark = "  DRIFT" if window.is_alarm else ""
        yield f"{window.ends_s / 60:>6.0f} min {window.requests:>9} {rate:>6} {cells}{mark}"
    if alarm is None:
        yield f"no drift: no measure is above {LIMIT} in two windows in succession"
        return
    yield (
        f"drift of {', '.join(alarm.drifted)} after {alarm.ends_s / 60:.0f} minutes: size again "
        f"with penstock size MODEL --from {log}, which replays what it proposes"
    )

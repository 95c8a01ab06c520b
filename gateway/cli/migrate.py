"""The command `penstock migrate`: converts another router's configuration to a gateway.yaml."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

from command_line import Argument, Option, UsageError
from gateway.cli.terminal_output import exit_with_error, print_line
from gateway.migrate import SOURCES, Additions, Draft, MigrationError, convert_text, convert_words
from gateway.migrate.config_draft import url_variables, variables
from gateway.migrate.yaml_text import MAX_CHARS

_PLACEHOLDER = "value-of-a-variable-that-is-not-set"


SourceArgument = Annotated[
    list[str],
    Argument(
        metavar="FILE | -- COMMAND...",
        help="File of the other router (- reads stdin), or the router's command line after --.",
    ),
]
KindOption = Annotated[
    str | None,
    Option(
        "--from",
        help="Kind of router that the source belongs to, needed if it is not "
        f"recognized: {', '.join(SOURCES)}.",
    ),
]
OutputOption = Annotated[
    Path | None,
    Option("--output", "-o", help="File to write the gateway.yaml to; default: stdout."),
]
ModelOption = Annotated[
    str | None,
    Option("--model", help="Name of the model, needed if the source names none."),
]
EngineOption = Annotated[
    list[str] | None,
    Option(
        "--engine",
        help="URL of an engine, needed if the source names none; "
        "repeat the option for more engines.",
    ),
]
ServiceOption = Annotated[
    str | None,
    Option("--service", help="Name of the Kubernetes Service that selects the engines."),
]
ReleaseOption = Annotated[
    str,
    Option("--release", help="Name of the Helm release that installed the vLLM production stack."),
]


def migrate(
    source: SourceArgument,
    kind: KindOption = None,
    output: OutputOption = None,
    model: ModelOption = None,
    engine: EngineOption = None,
    service: ServiceOption = None,
    release: ReleaseOption = "vllm",
) -> None:
    """Convert another router's command line or configuration file to a gateway.yaml.

    Settings that gateway.yaml has no equivalent of, and steps that remain to be done, are listed on
    stderr.
    """
    if kind is not None and kind not in SOURCES:
        raise UsageError(f"--from: the kind of router must be one of {', '.join(SOURCES)}")
    additions = Additions(model, tuple(engine or ()), service, release)
    try:
        draft, origin = _convert(source, kind, additions)
    except MigrationError as error:
        exit_with_error(str(error))
    text = draft.text(origin)
    if output is None:
        sys.stdout.write(text)
    else:
        output.write_text(text)
    for note in draft.notes:
        print_line(str(note), err=True)
    _check(draft, text, output)


def _convert(source: list[str], kind: str | None, additions: Additions) -> tuple[Draft, str]:
    # Convert a file, stdin or a command line; return the draft and the name of its origin.
    if len(source) > 1:
        return convert_words(source, kind, additions), "a command line"
    if source == ["-"]:
        return convert_text(sys.stdin.read(MAX_CHARS + 1), kind, additions), "stdin"
    try:
        with Path(source[0]).open(encoding="utf-8") as file:
            text = file.read(MAX_CHARS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise MigrationError(f"cannot read the file {source[0]}: {error}") from None
    return convert_text(text, kind, additions), Path(source[0]).name


def _check(draft: Draft, text: str, output: Path | None) -> None:
    # Check the result as `penstock check` does; exit with status 1 if it has a problem.
    from gateway.config import ConfigError, load_text

    names = dict.fromkeys(variables(draft.data))
    known = {name: os.environ.get(name) or _PLACEHOLDER for name in names}
    for number, name in enumerate(url_variables(draft.data)):
        known[name] = os.environ.get(name) or f"http://engine-{number}.invalid:8000"
    unset = [name for name in names if not os.environ.get(name)]
    try:
        load_text(text.encode(), str(output or "gateway.yaml"), {**os.environ, **known})
    except ConfigError as error:
        for problem in error.problems:
            print_line(str(problem), err=True)
        exit_with_error("the result does not pass `penstock check` yet; see above")
    if unset:
        print_line(f"to do: set {', '.join(unset)} before `penstock check` and `serve`", err=True)

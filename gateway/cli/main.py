"""The `penstock` command line: finds and runs the command; also the commands schema and version.

Exit codes: 0 success, 1 failure, 2 wrong usage. Each command is implemented in its own module. Two
kinds of modules are imported only when their command runs: those that the gateway must not depend
on (mockgpu, planner), and slow ones.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from io import TextIOWrapper
from types import MappingProxyType
from typing import Annotated, Any, NoReturn

from command_line import Option, run_command
from gateway.cli.commands import COMMANDS, command_function
from gateway.cli.shared_options import JsonOption, PolicyOption
from gateway.cli.terminal_output import exit_with_error, is_utf8_output, print_json, print_line
from gateway.util.version import version_facts, version_line
from policies.default_policy import DEFAULT_POLICY, SPLIT_POLICY


def config_in_text(text: str) -> dict[str, Any]:
    """Parse the text of a gateway.yaml, and return the configuration as GET /config shows it.

    Raises ConfigError if the text is not a valid configuration.
    """
    from gateway.config import load_text

    loaded = load_text(text.encode(), "gateway.yaml", os.environ)
    return loaded.config.model_dump(mode="json", by_alias=True)


EXTRAS: Mapping[str, str] = MappingProxyType(
    {"numpy": "demo", "rich": "demo", "textual": "top", "cryptography": "seal"}
)
"""Optional Python modules, each with the extra of this project that installs it."""

WRITE_FAILURES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""Error numbers that mean that the output device accepts no more data."""


def main() -> None:
    """Run the command given on the command line and exit."""
    # numpy is only used to hash prompts, so its linear algebra threads would only idle.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if isinstance(sys.stdout, TextIOWrapper) and not is_utf8_output():
        sys.stdout.reconfigure(errors="replace")
    try:
        run(sys.argv[1:])
    except ModuleNotFoundError as error:
        _exit_without_extra(error)
    except OSError as error:
        if error.errno not in WRITE_FAILURES:
            raise
        print_line(f"cannot write the output: {error.strerror}", style="red", err=True)
        # Python flushes stdout once more on exit; without this, that flush would raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def run(words: Sequence[str]) -> None:
    """Run a command, given the words of a command line.

    Raises SystemExit if it does not succeed, with status 2 for wrong usage.
    """
    name = words[0] if words else "--help"
    if name == "--version":
        version()
    elif name in ("--help", "-h"):
        print_line(_overview())
        if not words:
            raise SystemExit(2)
    elif name not in COMMANDS:
        close = [f"; did you mean {each}?" for each in get_close_matches(name, COMMANDS, n=1)]
        print_line(f"penstock: unknown command {name!r}{''.join(close)}", err=True)
        print_line("Try 'penstock --help' for a list.", err=True)
        raise SystemExit(2)
    else:
        function = command_function(name)
        program = f"penstock {name}"
        run_command(function, words[1:], program, os.environ, read_config=config_in_text)


def _overview() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "usage: penstock COMMAND [OPTIONS] [ARGUMENTS]",
            "",
            "A request router and prefill/decode gateway for LLM inference engines.",
            "",
            *(f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()),
            "",
            "`penstock COMMAND --help` shows the options of a command.",
            "`penstock --version` prints the version.",
        ]
    )


def _exit_without_extra(error: ModuleNotFoundError) -> NoReturn:
    # Print which extra installs the missing package, and exit with status 1.
    #
    # Raises the error again if no extra does.
    module = (error.name or "").partition(".")[0]
    if module not in EXTRAS:
        raise error
    print_line(
        f"this needs {module}, which is not installed: pip install 'penstock[{EXTRAS[module]}]'",
        style="red",
        err=True,
    )
    sys.exit(1)


_DIALECTS = (
    "KV transfer dialect of the engines: vllm_nixl, vllm_push, penstock, mooncake, sglang or "
    "trtllm."
)


def demo(
    groups: Annotated[
        int, Option("--groups", min=1, max=64, help="Number of mock engines to start.")
    ] = 4,
    policy: PolicyOption = None,
    port: Annotated[int, Option("--port", min=1, max=65535, help="Port of the OpenAI API.")] = 8080,
    admin_port: Annotated[
        int, Option("--admin-port", min=1, max=65535, help="Port of the admin server.")
    ] = 8081,
    model: Annotated[
        str, Option("--model", help="Name of the model that the mock TP groups serve.")
    ] = "demo-8b",
    speed: Annotated[
        float,
        Option(
            "--speed",
            min=0.01,
            help="Speed of the mock TP groups relative to real time (2 is twice as fast).",
        ),
    ] = 1.0,
    split: Annotated[
        bool,
        Option("--split", help="Let half of the TP groups do prefill and the other half decode."),
    ] = False,
    dialect: Annotated[
        str, Option("--dialect", help=f"KV transfer dialect, with --split: {_DIALECTS}")
    ] = "vllm_nixl",
) -> None:
    """Start the gateway with mock TP groups on this machine, and show what to try. No GPU needed.

    Ctrl-C stops everything.
    """
    from gateway.cli.demo import DemoError, DemoOptions, run_demo

    try:
        raise SystemExit(
            run_demo(
                DemoOptions(
                    groups,
                    policy or (SPLIT_POLICY if split else DEFAULT_POLICY),
                    port,
                    admin_port,
                    model,
                    speed,
                    dialect if split else None,
                )
            )
        )
    except DemoError as error:
        exit_with_error(str(error))


def schema() -> None:
    """Print the JSON Schema of the configuration file."""
    from gateway.config import json_schema

    print_json(json_schema())


def version(as_json: JsonOption = False) -> None:
    """Print the version, and whether the hot path is compiled or runs from sources."""
    if as_json:
        print_json(version_facts())
    else:
        print_line(version_line())

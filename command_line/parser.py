"""Parses the command line of a command with argparse, then calls the command's function."""

from __future__ import annotations

import argparse
import inspect
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NoReturn

from command_line.parameters import Parameter, UsageError, _OptionTraits, parameters_of

_NO_OPTION = "\0"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(
            2, f"{self.format_usage()}Try '{self.prog} --help' for help.\n\nError: {message}\n"
        )


def run_command(
    command: Callable[..., Any],
    words: Sequence[str],
    program: str,
    environment: Mapping[str, str],
    **given: Any,
) -> None:
    """Parse a command line and call the command's function with the values.

    command      function whose parameters have Option and Argument annotations
    words        the command line without the program's name, such as ["--port", "8080"]
    program      name of the program in help and errors, such as "penstock serve"
    environment  environment variables, read for options that have an `envvar`
    given        values of other parameters; those that the function does not have are ignored

    Raises SystemExit after printing the help (status 0), or an error if the command line or an
    option is invalid (status 2).
    """
    try:
        values = parse_command(command, words, program, environment)
        taken = inspect.signature(command).parameters
        command(**values, **{name: value for name, value in given.items() if name in taken})
    except UsageError as error:
        _parser(command, program, parameters_of(command)).error(str(error))


def parse_command(
    command: Callable[..., Any], words: Sequence[str], program: str, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Parse a command line as run_command() does, but do not call the command's function.

    Returns the values of the function's parameters by name.

    Raises UsageError or SystemExit if the command line is invalid.
    """
    parameters = parameters_of(command)
    parser = _parser(command, program, parameters)
    values = vars(parser.parse_intermixed_args(_mark_arguments(words)))
    for parameter in parameters:
        _complete(parameter, values, environment)
    return values


def short_help(command: Callable[..., Any]) -> str:
    """Return the first sentence of a command's docstring, for example for a list of commands."""
    text = " ".join((inspect.getdoc(command) or "").split("\n\n")[0].split())
    return text.partition(". ")[0].rstrip(".") + "."


def _mark_arguments(words: Sequence[str]) -> list[str]:
    # Mark the words after "--", so that argparse takes none of them for an option. Versions of
    # argparse differ in how they treat "--" before and between arguments.
    before = list(words)
    if "--" not in before:
        return before
    place = before.index("--")
    return [*before[:place], *(f"{_NO_OPTION}{word}" for word in before[place + 1 :])]


def _parser(
    command: Callable[..., Any], program: str, parameters: Sequence[Parameter]
) -> ArgumentParser:
    arguments = [_usage(each) for each in parameters if not each.is_option]
    parser = _Parser(
        prog=program,
        usage=" ".join([program, "[OPTIONS]", *arguments]).replace("%", "%%"),
        description=inspect.getdoc(command),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for parameter in parameters:
        _add(parser, parameter)
    return parser


def _usage(argument: Parameter) -> str:
    name = argument.traits.metavar or argument.name.upper()
    repeated = f"{name}..." if argument.is_list and not argument.traits.metavar else name
    return repeated if argument.is_required else f"[{repeated}]"


def _add(parser: ArgumentParser, parameter: Parameter) -> None:
    text = _help(parameter).replace("%", "%%")
    if not parameter.is_option:
        count = {(True, True): "+", (True, False): "*", (False, False): "?"}.get(
            (parameter.is_list, parameter.is_required)
        )
        parser.add_argument(
            parameter.name,
            type=_type(parameter),
            metavar=parameter.traits.metavar or parameter.name.upper(),
            help=text,
            default=parameter.default,
            nargs=count,
        )
    elif parameter.kind is bool:
        for flags, value, shown in (
            (parameter.on, True, text),
            (parameter.off, False, argparse.SUPPRESS if parameter.on else text),
        ):
            if flags:
                parser.add_argument(
                    *flags,
                    dest=parameter.name,
                    action="store_const",
                    const=value,
                    default=None,
                    help=shown,
                )
    else:
        parser.add_argument(
            *parameter.on,
            dest=parameter.name,
            type=_type(parameter),
            action="append" if parameter.is_list else "store",
            metavar=parameter.traits.metavar or _metavar(parameter.kind),
            default=None,
            help=text,
        )


def _type(parameter: Parameter) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return parameter.parse(text.removeprefix(_NO_OPTION))
        except (ValueError, UsageError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _metavar(kind: type) -> str:
    if issubclass(kind, Enum):
        return "|".join(str(member.value) for member in kind)
    return {int: "INTEGER", float: "NUMBER", str: "TEXT"}.get(kind, "PATH")


def _help(parameter: Parameter) -> str:
    notes = []
    if parameter.off and parameter.on:
        notes.append(f"off: {', '.join(parameter.off)}")
    if parameter.envvar:
        notes.append(f"environment: {parameter.envvar}")
    if parameter.is_required and parameter.is_option:
        notes.append("required")
    if parameter.default not in (None, False, "", []) and not callable(parameter.default):
        notes.append(f"default: {'on' if parameter.default is True else parameter.default}")
    return " ".join([parameter.traits.help, *(f"[{note}]" for note in notes)])


def _complete(parameter: Parameter, values: dict[str, Any], environment: Mapping[str, str]) -> None:
    # Set a value that was not given: from the environment, or the default.
    #
    # Raises UsageError for a missing or wrong value.
    traits = parameter.traits
    if not isinstance(traits, _OptionTraits):
        if parameter.is_list and not values[parameter.name]:
            values[parameter.name] = parameter.default
        return
    if values[parameter.name] is None and environment.get(traits.envvar or ""):
        values[parameter.name] = _from_environment(parameter, environment[traits.envvar or ""])
    if values[parameter.name] is None:
        if parameter.is_required:
            raise UsageError(f"the required option {parameter.on[0]} is missing")
        values[parameter.name] = parameter.default
    elif traits.check is not None:
        traits.check(values[parameter.name])


def _from_environment(parameter: Parameter, text: str) -> Any:
    if parameter.kind is bool:
        if text.lower() not in (*_TRUE, *_FALSE):
            raise UsageError(f"{parameter.envvar}={text} is not a valid boolean; use true or false")
        return text.lower() in _TRUE
    try:
        return parameter.parse(text)
    except ValueError as error:
        raise UsageError(f"{parameter.envvar}: {error}") from None

"""Turns the annotated parameters of a function into command-line options and arguments.

    def serve(port: Annotated[int, Option("--port", min=0, help="Port to listen on.")] = 8080): ...

A parameter without an Option or an Argument does not appear on the command line. Its value is
passed to run_command().
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import msgspec


class UsageError(Exception):
    """Raised by a command whose options are invalid or contradict each other."""


class Argument(msgspec.Struct, frozen=True, kw_only=True):
    """Marks a function's parameter as a positional command-line argument, in its annotation.

    help      text for `--help` and the reference page
    metavar   name of the value in the help; by default the parameter's name in capitals
    min, max  smallest and largest valid number; None means no limit
    is_file   whether a Path must name an existing file
    """

    help: str
    metavar: str | None = None
    min: float | None = None
    max: float | None = None
    is_file: bool = False


class _OptionTraits(Argument, frozen=True, kw_only=True):
    envvar: str | None = None
    parse: Callable[[str], Any] | None = None
    check: Callable[[Any], None] | None = None
    flags: tuple[str, ...] = ()


def Option(*flags: str, **traits: Any) -> _OptionTraits:  # noqa: N802
    """Mark a function's parameter as a command-line option, in its annotation.

    flags   names of the option, such as "--port", or "--yes/--no" for a bool. By default they are
            made from the parameter's name: a bool `dry_run` gets --dry-run and --no-dry-run
    traits  keyword arguments: those of Argument, and the following ones
    envvar  environment variable that is read if the option is not given
    parse   function that converts the text; raises ValueError or UsageError for invalid text
    check   function called with a given value; raises UsageError if the value is invalid
    """
    return _OptionTraits(flags=flags, **traits)


class Parameter(msgspec.Struct, frozen=True):
    """One command-line option or argument, made from a parameter of the command's function.

    name         name of the function's parameter
    on           flags that are followed by a value, or that turn a bool on; () for an argument
    off          flags that turn a bool off, such as --no-wait
    kind         type of one value, such as int
    is_list      whether several values can be given
    default      value if it is not given
    is_required  whether it must be given
    traits       the Option or Argument in the parameter's annotation
    """

    name: str
    on: tuple[str, ...]
    off: tuple[str, ...]
    kind: type[Any]
    is_list: bool
    default: Any
    is_required: bool
    traits: Argument

    @property
    def is_option(self) -> bool:
        return isinstance(self.traits, _OptionTraits)

    @property
    def envvar(self) -> str | None:
        return self.traits.envvar if isinstance(self.traits, _OptionTraits) else None

    def parse(self, text: str) -> Any:
        """Convert the text given on the command line to a value of the parameter's type.

        Raises ValueError or UsageError if the text is invalid.
        """
        traits = self.traits
        if isinstance(traits, _OptionTraits) and traits.parse is not None:
            return traits.parse(text)
        if issubclass(self.kind, Enum):
            return _member(self.kind, text)
        if self.kind is Path and traits.is_file:
            _check_file(Path(text))
        if self.kind in (int, float):
            return self._number(text)
        return self.kind(text)

    def _number(self, text: str) -> float:
        try:
            number: float = self.kind(text)
        except ValueError:
            if self.kind is int:
                raise ValueError(f"{text!r} is not a whole number such as 8") from None
            raise ValueError(f"{text!r} is not a number such as 0.5") from None
        least, most = self.traits.min, self.traits.max
        if least is not None and not number >= least:
            raise ValueError(f"{text} is too small; the smallest value is {least:g}")
        if most is not None and not number <= most:
            raise ValueError(f"{text} is too large; the largest value is {most:.10g}")
        return number


def _member(kind: type[Enum], text: str) -> Enum:
    names = [str(member.value) for member in kind]
    if text not in names:
        raise ValueError(f"{text!r} is not a valid value; use one of: {', '.join(names)}")
    return kind(text)


def _check_file(path: Path) -> None:
    if not path.exists():
        raise ValueError(f"the file {path} does not exist; give the path of an existing file")
    if path.is_dir():
        raise ValueError(f"{path} is a directory; give the path of a file")


def parameters_of(command: Callable[..., Any]) -> Sequence[Parameter]:
    """Return a function's command-line options and arguments, in order of definition."""
    found = []
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        traits = next(
            (each for each in get_args(parameter.annotation)[1:] if isinstance(each, Argument)),
            None,
        )
        if traits is not None:
            found.append(_parameter(name, parameter, traits))
    return found


def _parameter(name: str, parameter: inspect.Parameter, traits: Argument) -> Parameter:
    kind, is_list = _kind(get_args(parameter.annotation)[0])
    is_required = parameter.default is inspect.Parameter.empty
    on, off = _flags(name, traits, kind) if isinstance(traits, _OptionTraits) else ((), ())
    default = None if is_required else parameter.default
    return Parameter(name, on, off, kind, is_list, default, is_required, traits)


def _kind(annotation: Any) -> tuple[type[Any], bool]:
    if get_origin(annotation) in (Union, UnionType):
        (annotation,) = (each for each in get_args(annotation) if each is not NoneType)
    if get_origin(annotation) is list:
        return get_args(annotation)[0], True
    return annotation, False


def _flags(name: str, option: _OptionTraits, kind: type) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if not option.flags:
        flag = name.replace("_", "-")
        return (f"--{flag}",), (f"--no-{flag}",) if kind is bool else ()
    parts = [flag.partition("/") for flag in option.flags]
    return tuple(on for on, _, _ in parts), tuple(off for _, _, off in parts if off)

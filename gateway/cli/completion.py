"""The command `penstock completion`: prints the code that lets a shell complete commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Annotated

from command_line import Argument, Parameter, parameters_of, write_line
from gateway.cli.commands import COMMANDS, command_function


class Shell(StrEnum):
    """The shells for which `penstock completion` can print code."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    shell: Annotated[
        Shell, Argument(help="Shell to print the completion code for: bash, zsh or fish.")
    ],
) -> None:
    """Print the code with which a shell completes the commands of `penstock` and their options.

    For bash: penstock completion bash > ~/.local/share/bash-completion/completions/penstock
    """
    options = {name: _options(name) for name in COMMANDS}
    if shell is Shell.FISH:
        write_line("\n".join(_fish_lines(options)))
        return
    if shell is Shell.ZSH:
        write_line("autoload -U +X bashcompinit && bashcompinit")
    write_line("\n".join(_bash_lines(options)))


def _options(name: str) -> list[Parameter]:
    # Return a command's options; [] if it cannot be imported, because an extra is missing.
    try:
        parameters = parameters_of(command_function(name))
    except ModuleNotFoundError:
        return []
    return [parameter for parameter in parameters if parameter.is_option]


def _bash_lines(options: Mapping[str, Sequence[Parameter]]) -> Iterator[str]:
    yield from ("_penstock() {", '    local words=""', '    case "${COMP_WORDS[1]}" in')
    for name, parameters in options.items():
        flags = [flag for each in parameters for flag in (*each.on, *each.off)]
        yield f'        {name}) words="{" ".join([*flags, "--help"])}" ;;'
    yield "    esac"
    yield f'    [ "$COMP_CWORD" -ne 1 ] || words="{" ".join(options)}"'
    yield '    COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))'
    yield from ("}", "complete -o default -F _penstock penstock")


def _fish_lines(options: Mapping[str, Sequence[Parameter]]) -> Iterator[str]:
    for name, parameters in options.items():
        summary = COMMANDS[name][1].replace("'", "\\'")
        yield f"complete -c penstock -n __fish_use_subcommand -a {name} -d '{summary}'"
        for flag in [flag for each in parameters for flag in (*each.on, *each.off)]:
            kind = "-l" if flag.startswith("--") else "-s"
            chosen = f"'__fish_seen_subcommand_from {name}'"
            yield f"complete -c penstock -n {chosen} {kind} {flag.lstrip('-')}"

"""Turns annotated functions into commands: argparse parses their arguments."""

from command_line.output import styled, table_lines, write_line
from command_line.parameters import Argument, Option, Parameter, UsageError, parameters_of
from command_line.parser import parse_command, run_command, short_help

__all__ = [
    "Argument",
    "Option",
    "Parameter",
    "UsageError",
    "parameters_of",
    "parse_command",
    "run_command",
    "short_help",
    "styled",
    "table_lines",
    "write_line",
]

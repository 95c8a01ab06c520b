"""Parses `vllm serve` commands with vLLM's own argument parser, and prints the results as JSON.

Run it with the Python interpreter of the engines. It reads a JSON list of commands from stdin. Each
command is a list of words without `vllm serve`, such as ["MODEL", "--port", "8000"].

It ends with status 2 if vLLM rejects a command.
"""

from __future__ import annotations

import json
import sys

from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main() -> None:
    parser = make_arg_parser(FlexibleArgumentParser())
    for words in json.load(sys.stdin):
        members = vars(parser.parse_args(words))
        plain = {name: value for name, value in members.items() if _is_plain(value)}
        sys.stdout.write("parsed " + json.dumps(plain) + "\n")


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | bool)


if __name__ == "__main__":
    main()

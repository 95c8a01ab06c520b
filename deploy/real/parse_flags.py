"""Parse commands `vllm serve ...` with vLLM's own argument parser and print the results as JSON.

Run it with the engines' interpreter: standard input has a JSON list of commands, each a list of
words without `vllm serve`. A command that vLLM refuses ends the program with status 2.
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

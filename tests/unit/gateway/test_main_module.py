"""Tests that `penstock --version` does not import the command line."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from gateway.__main__ import main
sys.argv = ["penstock", *sys.argv[1:]]
main()
print("gateway.cli" in sys.modules, "argparse" in sys.modules)
"""


@pytest.mark.parametrize("arguments", [["version"], ["--version"], ["version", "--json"]])
def test_the_version_is_printed_without_the_command_line(arguments: list[str]) -> None:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    quick = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    program = "from gateway.cli import main; import sys; main.run(sys.argv[1:])"
    command = [sys.executable, "-c", program, *arguments]
    whole = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert quick == whole + "False False\n"

"""Runs the `penstock` command as `python -m gateway`.

The command line is imported inside `main`, so that Ctrl-C during slow imports ends the process
quietly.
"""

import json
import sys

from gateway.util.version import version_facts, version_line


def main() -> None:
    """Run the command line; exit with status 130 on Ctrl-C.

    Print the version without importing the command line, because that import takes 0.2 s.
    """
    try:
        if sys.argv[1:] in (["version"], ["--version"]) and _is_printed(version_line()):
            return
        if sys.argv[1:] == ["version", "--json"] and _is_printed(
            json.dumps(version_facts(), indent=2)
        ):
            return
        from gateway.cli import main as cli

        cli.main()
    except KeyboardInterrupt:
        sys.exit(130)


def _is_printed(text: str) -> bool:
    # Return whether stdout took the text; if not, the command line fails too, and says why.
    try:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()

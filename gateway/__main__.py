"""Runs the `penstock` command as `python -m gateway`.

`main` imports the command line itself, so that Ctrl-C during slow imports ends the process quietly.
"""

import sys


def main() -> None:
    """Run the command line; exit with status 130 on Ctrl-C."""
    try:
        from gateway.cli import main as cli

        cli.main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

"""`python -m gateway ...` is `penstock ...`. Light: Ctrl-C counts from here on, while the rest still loads."""

import sys


def main() -> None:
    """The entry point of the command `penstock`."""
    try:
        from gateway.cli import main as cli

        cli.main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

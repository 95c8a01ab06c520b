"""Writes the Prometheus rules and Grafana dashboards: `python -m tools.monitoring`

`make docs` writes the same files to deploy/. Use this command to choose another folder, or another
URL for the runbooks that the alerts link to.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.monitoring.files import files
from tools.monitoring.rules import RUNBOOKS


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.monitoring",
        description="Write the Prometheus rules and the Grafana dashboards.",
    )
    parser.add_argument(
        "--into", type=Path, default=Path(), help="folder to write to (default: the current one)"
    )
    parser.add_argument(
        "--runbooks",
        default=RUNBOOKS,
        help="URL or folder of the runbooks; the alert NAME links to NAME.md in it",
    )
    options = parser.parse_args()
    for path, text in files(options.runbooks).items():
        (options.into / path).parent.mkdir(parents=True, exist_ok=True)
        (options.into / path).write_text(text)


if __name__ == "__main__":
    main()

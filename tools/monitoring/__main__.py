"""`python -m tools.monitoring`: write the Prometheus rules and Grafana dashboards.

`make docs` writes the same files. This command can also set the folder and the URL of the runbooks.
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
        help="URL or folder of the alerts' runbooks; the page of an alert is at /NAME.md below it",
    )
    options = parser.parse_args()
    for path, text in files(options.runbooks).items():
        (options.into / path).parent.mkdir(parents=True, exist_ok=True)
        (options.into / path).write_text(text)


if __name__ == "__main__":
    main()

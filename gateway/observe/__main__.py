"""`python -m gateway.observe`: writes deploy/prometheus and deploy/grafana from the catalogue, or into another folder.

`make docs` writes the same; this is for those whose runbooks live elsewhere.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gateway.observe.files import files
from gateway.observe.rules import RUNBOOKS


def main() -> None:
    """Writes all files below the folder."""
    parser = argparse.ArgumentParser(prog="python -m gateway.observe", description="Write boards and rules.")
    parser.add_argument(
        "--into", type=Path, default=Path(), help="folder to write into, the project's root unless given"
    )
    parser.add_argument("--runbooks", default=RUNBOOKS, help="where alerts' pages are: a URL in front of /NAME.md")
    chosen = parser.parse_args()
    for path, text in files(chosen.runbooks).items():
        (chosen.into / path).parent.mkdir(parents=True, exist_ok=True)
        (chosen.into / path).write_text(text)


if __name__ == "__main__":
    main()

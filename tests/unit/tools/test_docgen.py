"""Tests that the generated documentation pages match the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.util.version import is_compiled
from tools import docgen

pytestmark = pytest.mark.skipif(
    is_compiled(), reason="pages are generated from docstrings, which compiled modules lack"
)

ROOT = Path(__file__).parents[3]
PAGES = docgen.generated_files()


@pytest.mark.parametrize("path", PAGES)
def test_a_reference_page_is_current(path: str) -> None:
    assert (ROOT / path).read_text() == PAGES[path], "run `make docs` and commit the result"


def test_no_table_row_lacks_a_meaning() -> None:
    for path, text in PAGES.items():
        if path.endswith(".md"):
            rows = [line for line in text.splitlines() if line.startswith("| `")]
            assert rows
            assert not [row for row in rows if row.endswith("|  |")], path

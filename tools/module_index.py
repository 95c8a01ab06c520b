"""Lists all modules by package, each with the first paragraph of its docstring.

docgen.py writes the list to docs/reference/modules.md.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    *("gateway", "policies", "kvtransfer", "mockgpu", "planner", "command_line", "tools"),
    *("bench", "deploy"),
)


def packages() -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    """Yield (path, summary, modules) for each folder that has modules.

    The modules are pairs of file name and summary. A summary is the first paragraph of a docstring,
    or "" without one.
    """
    for folder in FOLDERS:
        sources = [
            source for source in (ROOT / folder).rglob("*.py") if "node_modules" not in source.parts
        ]
        sources.sort(key=lambda source: source.parent.as_posix())
        for place in dict.fromkeys(source.parent for source in sources):
            modules = [
                (source.name, _summary(source))
                for source in sorted(place.glob("*.py"))
                if source.name != "__init__.py"
            ]
            if modules:
                yield (place.relative_to(ROOT).as_posix(), _summary(place / "__init__.py"), modules)


def _summary(source: Path) -> str:
    # Return the first paragraph of the module's docstring; "" without one.
    if not source.exists():
        return ""
    text = ast.get_docstring(ast.parse(source.read_text("utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())

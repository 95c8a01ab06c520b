"""The command `penstock seeds`: lists statements about LLM serving, each with a command to test
it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

from command_line import Argument, Option, write_line
from planner.seeds.statements import TITLES, ItemStatus, SeedItem, golden_text, seed_items

Number = Annotated[
    int | None, Argument(help="Number of the statement to show, 1 to 119. Default: all.")
]
OfSeed = Annotated[
    str | None,
    Option(
        "--seed",
        help=f"Show only the items of one seed (source of statements): {', '.join(TITLES)}.",
    ),
]
AsJson = Annotated[bool, Option("--json", help="Print the items as JSON instead of text.")]


def seeds(number: Number = None, seed: OfSeed = None, as_json: AsJson = False) -> None:
    """List 119 statements about LLM serving, with the command that tests each, and its outcome."""
    items = [
        item for item in seed_items() if number in (None, item.number) and seed in (None, item.seed)
    ]
    if not items:
        write_line(
            f"penstock seeds: no such item; valid: 1 to 119, --seed {', '.join(TITLES)}", err=True
        )
        raise SystemExit(2)
    write_line(json.dumps(msgspec.to_builtins(items), indent=2) if as_json else _text(items))


def _text(items: Sequence[SeedItem]) -> str:
    return "\n".join([*_lines(items), counts_text(items)])


def _lines(items: Sequence[SeedItem]) -> Iterator[str]:
    seed = ""
    for item in items:
        if item.seed != seed:
            seed = item.seed
            yield f"Seed {seed}. {TITLES[seed]}"
        yield f"{item.number:>4} {item.item}"
        if item.command:
            yield f"       $ {item.command}"
        yield f"       = {golden_text(item)}"
        if item.note:
            yield f"       note: {item.note}"


def counts_text(items: Sequence[SeedItem]) -> str:
    """Return a text with the numbers of statements that are answered, planned and missing."""
    counts = {status: sum(item.status is status for item in items) for status in ItemStatus}
    parts = [f"{count} {status.value}" for status, count in counts.items() if count]
    return f"{len(items)} items: {', '.join(parts)}"

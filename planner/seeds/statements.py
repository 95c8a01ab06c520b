"""The 119 statements of `penstock seeds`, each with its command and expected outcome.

The data is data/items.json. Tests run the command or function of every answered statement, and
compare its outcome with the expected one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from importlib.resources import files

import msgspec

TITLES: Mapping[str, str] = {
    "000": "Inference: TP for latency, replicas for throughput",
    "001": "Tensor, pipeline, expert and sequence parallelism for inference",
    "002": "Scaling inference: replication, TP and disaggregation",
    "003": "LLM tensor parallelism for inference explained (Harbor)",
    "004": "Inference parallelism: TP, PP, EP, DP for serving",
}


class ItemStatus(StrEnum):
    """Whether Penstock answers a statement of `penstock seeds`.

    ANSWERED: a command answers it. LATER: it belongs to a planned feature. MISSING: a part is
    missing, which `note` describes.
    """

    ANSWERED = "answered"
    LATER = "later"
    MISSING = "missing"


class SeedItem(msgspec.Struct, frozen=True):
    """One statement of `penstock seeds`, such as a table, a worked example or a checklist item.

    number   number of the statement, 1 to 119
    seed     number of the document that contains the statement (docs/sizing.md)
    item     the statement
    status   whether Penstock answers it
    command  the command line, configuration check or documentation page that tests the statement
    golden   expected outcomes by name: a number (within 1 %), or a text that the outcome must
             contain. A name such as `a.b` is a field of the JSON that `penstock size --json` prints
    note     how the outcome differs from the statement, or what is missing
    """

    number: int
    seed: str
    item: str
    command: str
    golden: Mapping[str, float | bool | str]
    note: str = ""
    status: ItemStatus = ItemStatus.ANSWERED


def seed_items() -> Sequence[SeedItem]:
    """Return all statements in the order of their numbers, 1 to 119."""
    data = files("planner.seeds").joinpath("data/items.json").read_bytes()
    return msgspec.json.decode(data, type=tuple[SeedItem, ...])


def golden_text(item: SeedItem) -> str:
    """Return the expected outcome of a statement in one line, or its status if it has none."""
    if not item.golden:
        return item.status.value
    return ", ".join(f"{name} {_value(value)}" for name, value in item.golden.items())


def _value(value: float | bool | str) -> str:
    if isinstance(value, str):
        return f'"{" ".join(value.split())}"'
    return str(value) if isinstance(value, bool | int) else f"{value:.4g}"

"""Parses the option `--slo` of `penstock replay`: latency budgets, or a YAML file of classes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from planner.replay.argument_parsing import ArgumentError, parse_seconds
from policies.routing_types import STANDARD, Slo


class _Class(msgspec.Struct, forbid_unknown_fields=True):
    ttft: str
    tpot: str
    weight: float = 1.0


def parse_classes(text: str) -> tuple[Slo, Mapping[str, Slo]]:
    """Parse latency budgets, and return the default service class and the others by name.

    `text` is such as `ttft=2s,tpot=50ms`, or the path of a YAML file. Raises ArgumentError if it is
    invalid.
    """
    if "=" not in text:
        return _from_file(Path(text))
    budgets = {"ttft": STANDARD.ttft_s, "tpot": STANDARD.tpot_s}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name.strip() not in budgets:
            raise ArgumentError(
                f"{part!r} is not a latency budget; give ttft and tpot, such as ttft=2s,tpot=50ms"
            )
        budgets[name.strip()] = parse_seconds(value)
    return Slo("standard", budgets["ttft"], budgets["tpot"]), {}


def _from_file(path: Path) -> tuple[Slo, Mapping[str, Slo]]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        plain = msgspec.convert(
            YAML(typ="safe", pure=True).load(path.read_text()), dict[str, _Class]
        )
        classes_by_name = {
            name: Slo(name, parse_seconds(class_.ttft), parse_seconds(class_.tpot), class_.weight)
            for name, class_ in plain.items()
        }
    except (
        YAMLError,
        OSError,
        UnicodeDecodeError,
        msgspec.ValidationError,
        ArgumentError,
    ) as error:
        raise ArgumentError(f"{path}: {error}") from None
    return classes_by_name.get("standard", STANDARD), classes_by_name

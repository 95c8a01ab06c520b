"""Tests that the preset hybrid-64, which combines all kinds of parallelism, is valid.

Wrong changes to it are refused.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.cli.main import run as penstock
from tests.command_runner import CommandRunner

FILE = Path(__file__).parents[4] / "deploy/config/hybrid-64.yaml"
TEXT = FILE.read_text()


def checked(tmp_path: Path, *changes: tuple[str, str]) -> tuple[int, str]:
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file = tmp_path / "gateway.yaml"
    file.write_text(text)
    result = CommandRunner().invoke(penstock, ["check", str(file)])
    return result.exit_code, result.output


def test_the_preset_is_valid_and_its_two_units_are_128_gpus(tmp_path: Path) -> None:
    status, output = checked(tmp_path)
    assert status == 0
    assert "2 endpoints, 128 GPUs" in "".join(output.splitlines())
    assert "warning" not in output


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([("pp: 4", "pp: 7"), ("gpus: 72", "gpus: 112"), ("gpus: 128", "gpus: 224")], "pp-uneven"),
        ([("dp: 8, ep: 4", "dp: 10, ep: 5")], "64 experts cannot be spread evenly over ep 5"),
        ([("dp: 8, ep: 4", "dp: 8, ep: 3")], "ep-ranks"),
        ([("tp: 2", "tp: 3")], "tp-heads"),
        ([("gpus: 128", "gpus: 64")], "take 128 GPUs, and there are 64"),
        ([("rack-2]", "rack-1]")], "take 128 GPUs, and it has 72"),
        ([("gpus: 72", "gpus: 60")], "domain-gpus"),
        ([("[rack-1]", "[rack-3]")], "unknown link domain rack-3"),
        (
            [(", domains: [rack-1]", ""), (", domains: [rack-2]", ""), ("tp: 2", "tp: 8"),
             ("dp: 8", "dp: 2"), ("  domains:", "  link_domain_gpus: 4\n  domains:")],
            "tp 8 crosses link domains of 4 GPUs",
        ),
    ],
)  # fmt: skip
def test_each_broken_variant_names_its_rule(
    tmp_path: Path, changes: list[tuple[str, str]], message: str
) -> None:
    _, output = checked(tmp_path, *changes)
    assert message in output


def test_a_tp_group_as_large_as_a_named_domain_needs_no_larger_default(tmp_path: Path) -> None:
    status, output = checked(tmp_path, ("tp: 2", "tp: 16"), ("dp: 8", "dp: 1"))
    assert status == 0
    assert "crosses link domains" not in output

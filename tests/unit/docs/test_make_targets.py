"""Tests that the targets of the Makefile run programs and files that exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from bench.load.locust_run import LOCUSTFILE

ROOT = Path(__file__).parents[3]
RECIPES = [
    line.strip() for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("\t")
]
MODULES = sorted(
    {
        match
        for line in RECIPES
        for match in re.findall(r"\$\(PY\) -m ([\w.]+)", line)
        if (ROOT / match.split(".")[0]).is_dir()
    }
)
SCRIPTS = sorted(
    {match for line in RECIPES for match in re.findall(r"(?<=[ (])[\w/]+/\w+\.(?:py|sh)\b", line)}
)


@pytest.mark.parametrize("module", MODULES)
def test_every_module_that_a_target_runs_can_be_found(module: str) -> None:
    assert importlib.util.find_spec(module) is not None


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_that_a_target_runs_exists(script: str) -> None:
    assert (ROOT / script).is_file()


def test_make_load_finds_its_locust_script() -> None:
    assert LOCUSTFILE.is_file()

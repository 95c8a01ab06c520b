"""docs/deploying.md names only what exists: files, commands and their options, configuration, chart values, metrics."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from ruamel.yaml import YAML

from gateway.cli import app
from gateway.config import examine
from gateway.metrics import Metrics

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "deploying.md").read_text()
SHELL = "\n".join(re.findall(r"```sh\n(.*?)```", GUIDE, re.DOTALL))
INLINE = re.findall(r"`(penstock [a-z]+[^`]*)`", GUIDE)
COMMANDS = re.findall(r"(?:^|-- |/)(penstock [a-z]+.*)$", SHELL, re.MULTILINE)


def test_every_file_that_it_names_is_there() -> None:
    named = set(re.findall(r"deploy/[A-Za-z0-9_./-]*[A-Za-z0-9]", GUIDE)) - {"deploy/penstock"}  # kubectl's deploy/NAME
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("line", sorted({*COMMANDS, *INLINE}))
def test_every_command_that_it_names_takes_these_options(line: str) -> None:
    group: Any = typer.main.get_command(app)
    name, *arguments = shlex.split(line)[1:]
    command = group.get_command(group.context_class(group), name)
    assert command is not None
    command.make_context(name, [str(ROOT / "README.md") if each == "FILE" else each for each in arguments]).close()


def test_it_tells_of_commands_at_all() -> None:
    assert {line.split()[1] for line in (*COMMANDS, *INLINE)} >= {"bench", "check", "diff", "rollback", "status"}


def test_every_make_target_that_it_names_is_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)`", GUIDE)) <= targets


def test_its_values_are_the_charts_and_their_configuration_passes_the_check(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)
    values = YAML(typ="safe").load(block)
    known = YAML(typ="safe").load((ROOT / "deploy/helm/penstock/values.yaml").read_text())
    assert values.keys() <= known.keys()
    (tmp_path / "secrets").mkdir()
    for each in values["secrets"]["files"]:
        (tmp_path / "secrets" / each["file"]).write_text(f"a-secret-of-{each['file']}-long-enough")
    with (tmp_path / "gateway.yaml").open("w") as file:
        YAML(typ="safe").dump({"version": 1, **values["config"]}, file)
    assert examine(tmp_path / "gateway.yaml", os.environ).warnings == ()


def test_every_metric_that_it_names_is_told() -> None:
    named = set(re.findall(r"penstock_[a-z_]+", GUIDE))
    assert named
    assert named <= set(re.findall(r"penstock_[a-z_]+", Metrics().render().decode()))

"""Tests of the command `penstock migrate`, which converts other routers' configurations."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.cli.main import run as penstock
from tests.command_runner import CommandRunner

DATA = Path("tests/data/migrate")
RUN = CommandRunner()


def test_a_file_is_converted_and_its_notes_go_to_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KEY", "the-key-of-the-engines")
    target = tmp_path / "gateway.yaml"
    result = RUN.invoke(
        penstock, ["migrate", str(DATA / "vllm-router.sh"), "--output", str(target)]
    )
    assert result.exit_code == 0, result.output
    assert "no counterpart: --max-tree-size" in result.stderr
    assert result.stdout == ""
    checked = RUN.invoke(penstock, ["check", str(target)])
    assert checked.exit_code == 0, checked.output


def test_a_command_line_and_stdin_are_converted_too() -> None:
    words = ["migrate", "--", "vllm-router", "--worker-urls", "http://e:8000"]
    direct = RUN.invoke(penstock, words)
    piped = RUN.invoke(penstock, ["migrate", "-"], input="vllm-router --worker-urls http://e:8000")
    assert direct.exit_code == piped.exit_code == 0
    assert direct.stdout.partition("\n")[2] == piped.stdout.partition("\n")[2]
    assert "http://e:8000" in direct.stdout


def test_variables_that_are_not_set_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_KEY", raising=False)
    result = RUN.invoke(penstock, ["migrate", str(DATA / "vllm-router.sh")])
    assert result.exit_code == 0
    assert "to do: set VLLM_KEY" in result.stderr


def test_a_result_that_does_not_pass_the_check_is_an_error() -> None:
    words = ["vllm-router", "--worker-urls", "ftp://e:8000"]
    result = RUN.invoke(penstock, ["migrate", "--", *words])
    assert result.exit_code == 1
    assert "penstock check" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["/no/such/file"], 1), (["--from", "nginx", "x"], 2), (["--", "nginx", "-g", "x"], 1)],
)
def test_what_is_not_known_is_refused(arguments: list[str], status: int) -> None:
    assert RUN.invoke(penstock, ["migrate", *arguments]).exit_code == status

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


def test_urls_of_engines_in_variables_become_references_with_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VLLM_BASE", "OTHER_BASE"):
        monkeypatch.delenv(name, raising=False)
    source, target = tmp_path / "config.yaml", tmp_path / "gateway.yaml"
    source.write_text(
        "model_list:\n"
        "- {model_name: a, litellm_params: {model: hosted_vllm/a, "
        "api_base: os.environ/VLLM_BASE}}\n"
        "- {model_name: b, litellm_params: {model: hosted_vllm/b, "
        "api_base: os.environ/OTHER_BASE}}\n"
    )
    result = RUN.invoke(penstock, ["migrate", str(source), "--output", str(target)])
    assert result.exit_code == 0, result.output
    assert "url: ${VLLM_BASE}" in target.read_text()
    assert "to do: model_list[0] a: api_base: set VLLM_BASE to the engine's URL" in result.stderr
    assert "to do: set VLLM_BASE, OTHER_BASE before" in result.stderr
    monkeypatch.setenv("VLLM_BASE", "http://10.0.0.1:8000")
    monkeypatch.setenv("OTHER_BASE", "http://10.0.0.2:8000")
    checked = RUN.invoke(penstock, ["check", str(target)])
    assert checked.exit_code == 0, checked.output


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

"""Tests that the command `penstock mock` refuses invalid options with an error of one line."""

from __future__ import annotations

import socket

import pytest

from gateway.cli.main import run as penstock
from tests.command_runner import CommandRunner


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--port", "65535", "--groups", "2"),
            "--port 65535: 2 groups need ports up to 65536, but 65535 is the last port",
        ),
        (("--port", "70000"), "65535"),
        (("--port", "0", "--kv-port", "80000"), "65535"),
        (("--port", "0", "--kv-port", "65530", "--groups", "9"), "--kv-port 65530"),
        (("--port", "0", "--bootstrap-port", "65535", "--groups", "2"), "--bootstrap-port 65535"),
        (("--port", "0", "--speed", "fast"), "not 'fast'"),
        (("--port", "0", "--speed", "-1"), "not '-1'"),
        (("--port", "0", "--speed", "nan"), "not 'nan'"),
        (("--port", "0", "--dialect", "vllm_nixl", "--handoff-timeout", "-1"), "-1"),
        (("--port", "0", "--dialect", "vllm_nixl", "--kv-lease", "nan"), "lease"),
        (("--port", "0", "--dialect", "vllm_nixl", "--engine-version", "newest"), "newest"),
        (("--port", "0", "--dialect", "vllm_nixl", "--kv-load-failure-policy", "hope"), "hope"),
        (("--port", "0", "--dialect", "vllm_nixl", "--tp", "3"), "3 ranks"),
    ],
)
def test_wrong_usage_exits_with_2_and_a_reason(options: tuple[str, ...], said: str) -> None:
    result = CommandRunner().invoke(penstock, ["mock", *options])
    assert result.exit_code == 2
    assert said in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    "options",
    [("--dialect", "vllm_nixl", "--kv-port"), ("--dialect", "mooncake", "--bootstrap-port")],
)
def test_a_port_of_a_half_that_is_taken_exits_1(options: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        result = CommandRunner().invoke(
            penstock, ["mock", "--port", "0", *options, str(listener.getsockname()[1])]
        )
    assert result.exit_code == 1
    assert "error: cannot listen: " in result.output


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--kv-tls", ""], "must be the path of a directory"),
        (["--kv-tls", "/no/such"], "/no/such/tls.crt"),
        (["--kv-tls", "x", "--kv-transport", "shm"], "not shm"),
    ],
    ids=["nothing", "missing files", "no TCP"],
)
def test_tls_options_that_cannot_work_are_named(options: list[str], complaint: str) -> None:
    result = CommandRunner().invoke(
        penstock, ["mock", "--port", "0", "--dialect", "vllm_nixl", *options]
    )
    assert result.exit_code == 2
    assert complaint in result.output

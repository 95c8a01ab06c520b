"""Tests that admin commands with a wrong address, server or key print one sentence and no
traceback.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from typer.testing import CliRunner

from gateway.cli import main
from gateway.cli.output import print_line, sanitize


class Stranger(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(404)
        self.end_headers()
        self.wfile.write(b'{"error": {"message": "no such path"}}')

    do_POST = do_GET

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def stranger() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Stranger) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    "words",
    [
        ["status"],
        ["history"],
        ["reload"],
        ["diff"],
        ["rollback", "1"],
        ["explain"],
        ["top", "--once"],
        ["chaos", "kill"],
    ],
)
def test_a_server_that_is_not_an_admin_server_is_reported(stranger: str, words: list[str]) -> None:
    done = CliRunner().invoke(main.app, [*words, "--admin", stranger])
    assert done.exit_code == 1
    assert f"{stranger} is not the admin server of a gateway (status 404)" in done.output


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://a..b", "http://" + "x" * 64, "http://:80", "ftp://h"]
)
def test_an_invalid_admin_url_is_wrong_usage(url: str) -> None:
    assert CliRunner().invoke(main.app, ["status", "--admin", url]).exit_code == 2


@pytest.mark.parametrize("key", ["ключ", "sk-canary\nX-Other: 1"])
def test_a_key_that_cannot_be_sent_is_an_error_and_not_printed(key: str, stranger: str) -> None:
    done = CliRunner().invoke(
        main.app, ["reload", "--admin", stranger], env={"PENSTOCK_ADMIN_KEY": key}
    )
    assert done.exit_code == 1
    assert "cannot be sent in an HTTP header" in done.output
    assert "canary" not in done.output


def test_escape_sequences_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitize("a\x1b[2Jb\x9b1m\u202ec\nd é") == "a\\x1b[2Jb\\x9b1m\\u202ec\nd é"
    print_line("model \x1b]0;title\x07")
    assert capsys.readouterr().out == "model \\x1b]0;title\\x07\n"


def test_the_version_option_prints_the_version() -> None:
    runner = CliRunner()
    assert (
        runner.invoke(main.app, ["--version"]).output == runner.invoke(main.app, ["version"]).output
    )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion_lists_commands(shell: str) -> None:
    typed = {
        "_PENSTOCK_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": "penstock dr",
        "COMP_CWORD": "1",
        "_TYPER_COMPLETE_ARGS": "penstock dr",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = subprocess.run(
        [sys.executable, "-c", "from gateway.__main__ import main; main()"],
        env=os.environ | typed,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "drain" in done.stdout
    assert "undrain" not in done.stdout

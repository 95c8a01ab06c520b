"""Tests that admin commands report a wrong address, server or key in one sentence."""

from __future__ import annotations

import shlex
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from gateway.cli import main
from gateway.cli.terminal_output import print_line, sanitize
from tests.command_runner import CommandRunner


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
    done = CommandRunner().invoke(main.run, [*words, "--admin", stranger])
    assert done.exit_code == 1
    assert f"{stranger} is not the admin server of a gateway (status 404)" in done.output


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://a..b", "http://" + "x" * 64, "http://:80", "ftp://h"]
)
def test_an_invalid_admin_url_is_wrong_usage(url: str) -> None:
    assert CommandRunner().invoke(main.run, ["status", "--admin", url]).exit_code == 2


@pytest.mark.parametrize("key", ["ключ", "sk-canary\nX-Other: 1"])
def test_a_key_that_cannot_be_sent_is_an_error_and_not_printed(key: str, stranger: str) -> None:
    done = CommandRunner().invoke(
        main.run, ["reload", "--admin", stranger], env={"PENSTOCK_ADMIN_KEY": key}
    )
    assert done.exit_code == 1
    assert "cannot be sent in an HTTP header" in done.output
    assert "canary" not in done.output


def test_escape_sequences_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitize("a\x1b[2Jb\x9b1m\u202ec\nd é") == "a\\x1b[2Jb\\x9b1m\\u202ec\nd é"
    print_line("model \x1b]0;title\x07")
    assert capsys.readouterr().out == "model \\x1b]0;title\\x07\n"


def test_the_version_option_prints_the_version() -> None:
    runner = CommandRunner()
    assert (
        runner.invoke(main.run, ["--version"]).output == runner.invoke(main.run, ["version"]).output
    )


def _completed(*words: str) -> list[str]:
    # Return what bash offers for the last of the words.
    code = CommandRunner().invoke(main.run, ["completion", "bash"]).stdout
    ask = f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _penstock"
    script = f'{code}\n{ask}; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_bash_completes_commands_and_their_options() -> None:
    assert _completed("penstock", "dr") == ["drift", "drain"]
    assert _completed("penstock", "drain", "--wa") == ["--wait"]
    assert "--help" in _completed("penstock", "version", "")


def test_zsh_and_fish_get_the_same_commands_and_options() -> None:
    zsh, fish = (
        CommandRunner().invoke(main.run, ["completion", name]).stdout for name in ("zsh", "fish")
    )
    assert zsh.endswith(CommandRunner().invoke(main.run, ["completion", "bash"]).stdout)
    assert "bashcompinit" in zsh
    assert "complete -c penstock -n __fish_use_subcommand -a drain -d 'Stop routing" in fish
    assert "complete -c penstock -n '__fish_seen_subcommand_from drain' -l wait\n" in fish

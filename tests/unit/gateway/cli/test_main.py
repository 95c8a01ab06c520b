"""Tests of what scripts rely on in the command line: commands, options, output, exit statuses."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from command_line import short_help
from gateway.cli import main
from gateway.cli.commands import COMMANDS, command_function
from gateway.config import json_schema
from gateway.protocol.response import relay
from policies.prefix.block_hash import is_loop_in_c
from tests.command_runner import CommandRunner
from tests.ports import free_port

ROOT = Path(__file__).parents[4]
GOOD = "version: 1\npools:\n  chat:\n    endpoints:\n      - url: http://127.0.0.1:9000\n"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> CommandRunner:
    monkeypatch.setenv("COLUMNS", "200")
    return CommandRunner()


@pytest.fixture
def used_port() -> Iterator[int]:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        yield holder.getsockname()[1]


def options(runner: CommandRunner, command: str) -> str:
    result = runner.invoke(main.run, [command, "--help"])
    assert result.exit_code == 0
    return result.output


@pytest.mark.parametrize(
    ("command", "promised"),
    [
        ("demo", ["--groups", "--policy", "--port"]),
        ("serve", ["--config", "--engine", "--policy", "--host", "--port", "--admin-port"]),
        (
            "mock",
            [
                "--port",
                "--groups",
                "--model",
                "--gpu",
                "--tp",
                "--role",
                "--speed",
                "--seed",
                "--fault",
            ],
        ),
        ("bench", ["--url", "--json"]),
        (
            "replay",
            [
                "--fleet",
                "--policy",
                "--admission",
                "--rate",
                "--slo",
                "--faults",
                "--json",
                "--report",
            ],
        ),
        ("check", ["--json"]),
        ("version", ["--json"]),
    ],
)
def test_a_command_has_its_documented_options(
    runner: CommandRunner, command: str, promised: list[str]
) -> None:
    shown = options(runner, command)
    assert [option for option in promised if option not in shown] == []


def test_help_lists_every_command(runner: CommandRunner) -> None:
    shown = runner.invoke(main.run, ["--help"]).output
    assert all(
        f" {name} " in shown
        for name in ("demo", "serve", "mock", "bench", "replay", "check", "schema", "version")
    )


def test_the_list_of_commands_says_of_each_what_its_own_help_begins_with() -> None:
    summaries = {name: summary for name, (_, summary) in COMMANDS.items()}
    assert summaries == {name: short_help(command_function(name)) for name in COMMANDS}


def test_a_mistyped_command_is_named_with_the_one_that_was_meant(runner: CommandRunner) -> None:
    result = runner.invoke(main.run, ["serv"])
    assert result.exit_code == 2
    assert "unknown command 'serv'; did you mean serve?" in result.stderr


def test_check_of_a_valid_file_exits_0(runner: CommandRunner, tmp_path: Path) -> None:
    (tmp_path / "g.yaml").write_text(GOOD)
    result = runner.invoke(main.run, ["check", str(tmp_path / "g.yaml")])
    assert (result.exit_code, "is valid" in result.output) == (0, True)


def test_check_prints_every_problem_with_its_position_and_exits_1(
    runner: CommandRunner, tmp_path: Path
) -> None:
    file = tmp_path / "g.yaml"
    file.write_text(GOOD + "timeouts: {connect: 5}\nretires: {}\n")
    result = runner.invoke(main.run, ["check", str(file)])
    assert result.exit_code == 1
    assert f"{file}:6:21 timeouts.connect: '5' is not a duration" in result.output
    assert f'{file}:7:1 retires: unknown key; did you mean "retries"?' in result.output
    assert "2 problems" in result.output


def test_check_prints_the_same_as_json(runner: CommandRunner, tmp_path: Path) -> None:
    file = tmp_path / "g.yaml"
    file.write_text(GOOD + "timeouts: {connect: 5}\n")
    result = runner.invoke(main.run, ["check", "--json", str(file)])
    reply = json.loads(result.output)
    assert (result.exit_code, reply["ok"]) == (1, False)
    assert reply["problems"][0] | {"message": ""} == {
        "file": str(file),
        "line": 6,
        "col": 21,
        "path": "timeouts.connect",
        "message": "",
    }
    file.write_text(GOOD)
    reply = json.loads(runner.invoke(main.run, ["check", "--json", str(file)]).output)
    assert (reply["ok"], reply["endpoints"], reply["warnings"]) == (True, 1, [])


def test_schema_prints_the_schema(runner: CommandRunner) -> None:
    assert json.loads(runner.invoke(main.run, ["schema"]).output) == json_schema()


def test_version_prints_the_version(runner: CommandRunner) -> None:
    reply = json.loads(runner.invoke(main.run, ["version", "--json"]).output)
    assert runner.invoke(main.run, ["version"]).output.startswith(f"penstock {reply['penstock']} ")
    assert reply["compiled"] is not relay.__file__.endswith(".py")


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve"],
        ["serve", "--config", "x.yaml", "--engine", "http://h:1"],
        ["serve", "--config", "x.yaml", "--port", "1"],
        ["serve", "--config", "x.yaml", "--engine-key", "sk-1"],
        ["doctor", "--config", "x.yaml", "--engine-key", "sk-1"],
        ["serve", "--port", "70000", "--engine", "http://h:1"],
        ["demo", "--groups", "0"],
        ["check"],
        ["nonsense"],
        ["version", "--nonsense"],
        ["plan", "x.yaml", "--fail-if-worse", "-5"],
    ],
)
def test_wrong_usage_exits_2(runner: CommandRunner, arguments: list[str]) -> None:
    assert runner.invoke(main.run, arguments).exit_code == 2


def test_serve_rejects_an_invalid_file_before_it_listens(
    runner: CommandRunner, tmp_path: Path
) -> None:
    (tmp_path / "g.yaml").write_text("version: 2\n")
    result = runner.invoke(main.run, ["serve", "--config", str(tmp_path / "g.yaml")])
    assert (result.exit_code, "must be 1" in result.output) == (1, True)


ENGINES = "version: 1\nlisteners: {api: {port: 0}, admin: {port: 0}}\npools: {p: {endpoints: [{url: 'http://127.0.0.1:1'}]}}\n"


def test_serve_names_an_access_log_that_cannot_be_written(
    runner: CommandRunner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "g.yaml").write_text(
        f"{ENGINES}observability: {{access_log: {tmp_path / 'no' / 'a.log'}}}\n"
    )
    assert runner.invoke(main.run, ["serve", "--config", str(tmp_path / "g.yaml")]).exit_code == 1
    assert "the gateway cannot start: observability.access_log: " in caplog.text
    assert "a.log" in caplog.text


@pytest.mark.parametrize("listener", ["api", "admin"])
@pytest.mark.parametrize("workers", ["1", "2"])
def test_serve_names_the_key_of_an_address_it_cannot_bind(
    runner: CommandRunner,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    listener: str,
    workers: str,
) -> None:
    port = free_port()  # the text combines this port with an address reserved for documentation
    text = ENGINES.replace(
        f"{listener}: {{port: 0}}", f"{listener}: {{host: 192.0.2.1, port: {port}}}"
    )
    (tmp_path / "g.yaml").write_text(f"{text}observability: {{access_log: 'off'}}\n")
    result = runner.invoke(
        main.run, ["serve", "--config", str(tmp_path / "g.yaml"), "--workers", workers]
    )
    assert result.exit_code == 1
    assert f"cannot listen on listeners.{listener}, http://192.0.2.1:{port}: " in caplog.text


def test_serve_names_a_port_in_use_and_the_option_to_change_it(
    runner: CommandRunner, used_port: int
) -> None:
    result = runner.invoke(
        main.run, ["serve", "--engine", "http://127.0.0.1:1", "--port", str(used_port)]
    )
    assert result.exit_code == 1
    assert f"port {used_port} is in use" in result.output
    assert "--port" in result.output


def test_demo_names_a_port_in_use_and_the_option_to_change_it(
    runner: CommandRunner, used_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(
        main.run, ["demo", "--admin-port", str(used_port), "--port", str(free_port())]
    )
    assert result.exit_code == 1
    assert f"port {used_port} is in use" in result.output
    assert "--admin-port" in result.output
    assert not (tmp_path / "penstock-demo").exists(), "nothing was written"


def test_help_imports_neither_the_data_plane_nor_the_configuration() -> None:
    heavy = ("aiohttp", "pydantic", "rich", "mockgpu", "planner", "numpy")
    code = f"import sys, gateway.cli.main; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["version", "schema"])
def test_a_full_disk_prints_one_line_and_no_traceback(command: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "gateway", command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert (done.returncode, done.stderr) == (
        1,
        "cannot write the output: No space left on device\n",
    )


CTRL_C = """
import runpy, sys
class Now:
    def find_spec(self, name, path, target=None):
        if name == {name!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Now())
sys.argv = ["penstock", "top"]
runpy.run_module("gateway", run_name="__main__")
"""


@pytest.mark.parametrize(
    "name", ["gateway.cli.main", "argparse", "command_line", "gateway.cli.top.command"]
)
def test_ctrl_c_during_imports_prints_no_traceback(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CTRL_C.format(name=name)], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_output_has_no_colour_with_no_color(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gateway", "check", str(tmp_path / "none.yaml")],
        capture_output=True,
        text=True,
        env={"NO_COLOR": "1", "FORCE_COLOR": "1", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 1
    assert "\x1b[3" not in done.stderr


def test_serve_warns_when_neither_a_compiled_module_nor_numpy_hashes_prompts() -> None:
    program = (
        "import sys; sys.modules['numpy'] = None; import gateway.process_lifecycle; "
        "gateway.process_lifecycle.run_gateway = lambda *_, **__: 0; import gateway.cli.main as cli; "
        "cli.main()"
    )
    options = ["serve", "--engine", "http://127.0.0.1:1", "--port", "0", "--admin-port", "0"]
    result = subprocess.run(
        [sys.executable, "-P", "-c", program, *options],  # -P: PYTHONPATH before this folder
        env=os.environ | {"PYTHONPATH": os.environ.get("PENSTOCK_HOME", str(ROOT))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ("pip install 'penstock[demo]'" in result.stderr) is not is_loop_in_c()


@pytest.mark.parametrize("name", ["SIGHUP", "SIGUSR2"])
def test_a_signal_to_reload_or_restart_does_not_end_a_gateway_that_starts(name: str) -> None:
    program = (
        "import gateway.cli.main as cli, gateway.process_lifecycle as life, os, signal; "
        f"interrupt = lambda: os.kill(os.getpid(), signal.{name}); "
        "import gateway.workers.worker_count as count; resolve = count.resolve_worker_count; "
        "count.resolve_worker_count = lambda workers: interrupt() or resolve(workers); "
        "life.run_gateway = lambda *_, **__: interrupt() or 0; cli.main()"
    )
    options = ["serve", "--engine", "http://127.0.0.1:1", "--port", "0", "--admin-port", "0"]
    result = subprocess.run(
        [sys.executable, "-P", "-c", program, *options],
        env=os.environ | {"PYTHONPATH": os.environ.get("PENSTOCK_HOME", str(ROOT))},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr

"""Tests of the pure wheels of penstock and penstock-kv, built from this checkout.

tests/wheel/test_penstock_kv.py installs released wheels as users do.
"""

from __future__ import annotations

import email
import importlib.util
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path
from typing import NamedTuple

import pytest

from tools.compile.wheel import build_pure_wheel, build_sdist, copy_tracked_files

ROOT = Path(__file__).parents[4]
OF_AN_ENGINE = {"msgspec", "numpy"}  # packages that vLLM 0.32 requires itself


class Wheel(NamedTuple):
    """A wheel without extension modules."""

    path: Path

    def files(self) -> set[str]:
        with zipfile.ZipFile(self.path) as archive:
            return set(archive.namelist())

    def metadata(self) -> Message:
        with zipfile.ZipFile(self.path) as archive:
            (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
            return email.message_from_bytes(archive.read(name))

    def requirements(self) -> list[str]:
        # Return what is required without extras.
        lines = self.metadata().get_all("Requires-Dist", [])
        return [line for line in lines if "extra ==" not in line]


@pytest.fixture(scope="module")
def sdist_of_kv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_sdist(ROOT / "kvtransfer", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def kv(sdist_of_kv: Path, tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    return Wheel(build_pure_wheel(sdist_of_kv, tmp_path_factory.mktemp("kv")))


@pytest.fixture(scope="module")
def penstock(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    # Install from the sources, because building an sdist first takes several times as long.
    source = tmp_path_factory.mktemp("source")
    copy_tracked_files(ROOT, source)
    return Wheel(build_pure_wheel(source, tmp_path_factory.mktemp("penstock")))


@pytest.fixture(scope="module")
def engine(kv: Wheel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    # Return the environment of a Python that has penstock-kv and what it requires, and no more:
    # `python -S` leaves out the packages of this Python.
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(kv.path) as archive:
        archive.extractall(site)
    for name in ("msgspec", "numpy", "xxhash"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        package = Path(spec.origin).parent
        for folder in (package, package.with_name(f"{name}.libs")):
            if folder.exists():
                (site / folder.name).symlink_to(folder)
    return {**os.environ, "PYTHONPATH": str(site)}


def _run(env: dict[str, str], cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-S", *arguments]
    return subprocess.run(
        command, env=env, cwd=cwd, capture_output=True, text=True, check=False, timeout=300
    )


def test_no_file_is_in_both_wheels(penstock: Wheel, kv: Wheel) -> None:
    assert penstock.files() & kv.files() == set()
    tops = [{name.split("/")[0] for name in each.files()} for each in (penstock, kv)]
    ours = [{top for top in some if not top.endswith(".dist-info")} for some in tops]
    assert ours == [
        {"command_line", "gateway", "mockgpu", "planner", "policies"},
        {"kvtransfer", "penstock_kv"},
    ]


def test_penstock_requires_penstock_kv_of_its_own_version(penstock: Wheel, kv: Wheel) -> None:
    version = kv.metadata()["Version"]
    assert penstock.metadata()["Version"] == version
    assert f"penstock-kv=={version}" in penstock.requirements()
    extras = penstock.metadata().get_all("Requires-Dist", [])
    assert {re.split("[=;]+", line)[1] for line in extras if line.startswith("penstock-kv")} == {
        version
    }


def test_penstock_kv_brings_xxhash_at_most_into_an_engine(kv: Wheel) -> None:
    names = {re.split(r"[<>=!~;\[ ]", line)[0] for line in kv.requirements()}
    assert names - OF_AN_ENGINE <= {"xxhash"}
    assert all(re.fullmatch(r"[a-z]+>=[\d.]+", line) for line in kv.requirements())


def test_the_wheel_of_penstock_kv_has_every_module_and_no_build_script(kv: Wheel) -> None:
    sources = ROOT / "kvtransfer"
    wanted = {path.relative_to(sources) for path in sources.rglob("*.py")} - {Path("setup.py")}
    in_wheel = {
        Path(name.removeprefix("kvtransfer/")) for name in kv.files() if name.endswith(".py")
    }
    assert in_wheel == wanted


def test_the_sdist_of_penstock_kv_has_every_file_of_the_project(sdist_of_kv: Path) -> None:
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    output = subprocess.run(listed, cwd=ROOT / "kvtransfer", capture_output=True, check=True).stdout
    with tarfile.open(sdist_of_kv) as archive:
        packed = {Path(*Path(each.name).parts[1:]) for each in archive if each.isfile()}
    made = {path for path in packed if path.parts[0] == "penstock_kv.egg-info"}
    tracked = {Path(name) for name in output.decode().split("\0")[:-1]}
    assert packed - made == tracked | {Path("PKG-INFO"), Path("setup.cfg")}


def test_penstock_kv_alone_moves_kv_over_tcp_without_a_compiled_module(
    engine: dict[str, str], tmp_path: Path
) -> None:
    program, page = ROOT / "tests" / "kv_without_gateway.py", ROOT / "docs" / "kvtransfer.md"
    done = _run(engine, tmp_path, str(program), str(page))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "importable": ["kvtransfer", "penstock_kv"],
        "has_pump": False,
    }


def test_the_connector_without_vllm_fails_with_one_sentence_that_names_it(
    engine: dict[str, str], tmp_path: Path
) -> None:
    done = _run(engine, tmp_path, "-c", "import penstock_kv.vllm")
    assert done.stderr.splitlines()[-1] == (
        "ImportError: PenstockConnector needs vLLM 0.32 in this Python environment:"
        " No module named 'vllm'"
    )
    assert "During handling" not in done.stderr


def test_both_projects_have_the_same_licence_and_need_the_same_python() -> None:
    assert (ROOT / "LICENSE").read_text() == (ROOT / "kvtransfer" / "LICENSE").read_text()
    penstock, kv = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        for folder in ("", "kvtransfer")
    )
    for key in ("version", "license", "requires-python"):
        assert penstock[key] == kv[key]

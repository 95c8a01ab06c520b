"""Tests of the wheels in dist/, installed with pip as users do, with the extra `demo`.

`make smoke-wheel` builds and tests one wheel; `make wheel test-wheels` does so for all. If root has
mmdebstrap, the wheel for Debian's Python is also tested in a plain Debian.
"""

from __future__ import annotations

import json
import os
import resource
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.demo_process import started_demo
from tests.duration_limits import pace
from tools.compile.wheel import DIST, copy_tracked_files, find_interpreters

ROOT = Path(__file__).parents[2]

ANSWERS_WITHIN_S = 15.0
MOST_PACKAGES = 20
MOST_BYTES, MOST_BYTES_UNOPTIMIZED = 60_000_000, 74_000_000
"""Maximum bytes of everything that is installed, and with extension modules built with -O0."""
VERSION_CPU_S = 0.3
DEBIAN = os.environ.get("PENSTOCK_DEBIAN")  # the root of a Debian with python3-venv

Command = Callable[..., list[str]]


def _interpreters() -> list[str]:
    found = [sys.executable] if os.environ.get("PENSTOCK_ONE_WHEEL") else find_interpreters()
    return [python for python in found if _wheels(python)]


def _wheels(python: str) -> list[Path]:
    program = "import sys; print('cp%d%d' % sys.version_info[:2])"
    tag = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    return list(DIST.glob(f"penstock-*-{tag.stdout.strip()}-*.whl"))


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout


@pytest.fixture(scope="module", autouse=True)
def _without_the_sources() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONPATH", raising=False)
        yield


@pytest.fixture(scope="module", params=[*_interpreters(), *filter(None, [DEBIAN])])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Command:
    # Install the wheel; return a function that builds the command line of an installed program.
    if request.param == DEBIAN:
        return _in_debian(Path(request.param).resolve())  # programs run in other folders
    venv = tmp_path_factory.mktemp("venv")
    _run([request.param, "-m", "venv", str(venv)])
    (wheel,) = _wheels(request.param)
    _run([*_pip_install(venv), f"{wheel}[demo]"])
    return lambda program, *arguments: [str(venv / "bin" / program), *arguments]


def _pip_install(venv: Path) -> list[str]:
    # penstock-kv comes from dist/, too.
    return [str(venv / "bin" / "pip"), "install", "-q", "--find-links", str(DIST)]


def _in_debian(root: Path) -> Command:
    # Install the wheel in a Debian, from files downloaded before, because it has no network.
    (wheel,) = DIST.glob("penstock-*-cp311-*.whl")
    download = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:"]
    download += ["--find-links", str(DIST)]
    # pip evaluates markers for its own Python: redis needs async-timeout on Debian's 3.11.2 only.
    wanted = [f"{wheel}[demo]", "async-timeout>=4.0.3"]
    _run([*download, "--python-version", "3.11.2", "-d", str(root / "wheels"), *wanted])

    def inside(*arguments: str) -> list[str]:
        environment = ["env", "-i", "PATH=/usr/bin:/bin", "HOME=/root", "LC_ALL=C.UTF-8"]
        program = f"cd /root && exec {shlex.join([*environment, *arguments])}"
        return ["chroot", str(root), "sh", "-c", program]

    _run(inside("python3", "-m", "venv", "--clear", "/opt/penstock"))
    pip = ["/opt/penstock/bin/pip", "install", "-q", "--no-index", "--find-links", "/wheels"]
    _run(inside(*pip, f"/wheels/{wheel.name}[demo]"))
    return lambda program, *arguments: inside(f"/opt/penstock/bin/{program}", *arguments)


def test_its_request_path_is_compiled_and_version_is_quick(place: Command) -> None:
    cpu_s = []
    for _ in range(5):
        before = _children_cpu_s()
        reply = json.loads(_run(place("penstock", "version", "--json")))
        cpu_s.append(_children_cpu_s() - before)
    assert reply["compiled"] is True
    assert min(cpu_s) <= VERSION_CPU_S


def test_a_demo_answers_soon(place: Command, tmp_path: Path) -> None:
    with started_demo(place, tmp_path) as demo:
        assert "compiled" in demo.output
        assert demo.ask()
        assert demo.age_s() <= ANSWERS_WITHIN_S * pace()


@pytest.fixture(scope="module", params=_interpreters())
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    venv = tmp_path_factory.mktemp("plain")
    _run([request.param, "-m", "venv", str(venv)])
    (wheel,) = _wheels(request.param)
    _run([*_pip_install(venv), str(wheel)])
    return venv


def test_without_extras_it_brings_few_and_small_packages(plain: Path) -> None:
    packages = json.loads(_run([str(plain / "bin" / "pip"), "list", "--format", "json"]))
    names = {package["name"] for package in packages} - {
        "pip",
        "setuptools",
        "penstock",
        "penstock-kv",
    }
    assert len(names) <= MOST_PACKAGES, sorted(names)
    assert "numpy" not in names
    files = [
        path
        for path in plain.glob("lib/python*/site-packages/**/*")
        if path.is_file()
        and not {"pip", "setuptools", "pkg_resources", "__pycache__"} & set(path.parts)
    ]
    unoptimized = "-O0" in os.environ.get("CFLAGS", "").split()
    most = MOST_BYTES_UNOPTIMIZED if unoptimized else MOST_BYTES
    assert sum(path.stat().st_size for path in files) <= most


def test_no_source_lies_beside_its_extension_module(plain: Path) -> None:
    compiled = list(plain.glob("lib/python*/site-packages/gateway/**/*.so"))
    assert len(compiled) > 50
    assert [path for path in compiled if path.name.startswith("_byte_scan.")]
    assert not [path for path in compiled if (path.parent / _source_name(path)).exists()]


def _source_name(extension_module: Path) -> str:
    return f"{extension_module.name.partition('.')[0]}.py"


def test_without_extras_it_checks_serves_and_is_operated(plain: Path, tmp_path: Path) -> None:
    penstock = str(plain / "bin" / "penstock")
    with started_demo(lambda name, *rest: [str(plain / "bin" / name), *rest], tmp_path) as demo:
        assert demo.ask()
        admin = demo.output.partition("Live view")[2].split()[0]
        status = _run([penstock, "status", "--admin", admin])
        assert "4 of 4 endpoints available" in status
        assert "group" in _run([penstock, "explain", "--admin", admin])
        drained = json.loads(_run([penstock, "top", "--json", "--admin", admin]))["endpoints"][0]
        assert "is drained" in _run([penstock, "drain", drained["name"], "--admin", admin])
        assert "passed" in _run([penstock, "doctor", "--engine", drained["url"]])
        assert "is valid" in _run([penstock, "check", str(tmp_path / "penstock-demo/gateway.yaml")])


@pytest.mark.parametrize(
    ("command", "extra"), [("replay", "demo"), ("plan gateway.yaml", "demo"), ("top --once", "top")]
)
def test_a_missing_package_is_named_with_its_extra(plain: Path, command: str, extra: str) -> None:
    result = subprocess.run(
        [str(plain / "bin" / "penstock"), *command.split()],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == 1
    assert f"pip install 'penstock[{extra}]'" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.fixture(scope="module")
def sdist() -> Path:
    found = list(DIST.glob("penstock-*.tar.gz"))
    if not found:
        pytest.skip("dist/ has no sdist: `make wheel` builds one")
    return found[0]


def test_the_sdist_has_every_file_of_the_project(sdist: Path, tmp_path: Path) -> None:
    copy_tracked_files(ROOT, tmp_path)
    tracked = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    with tarfile.open(sdist) as archive:
        packed = {Path(*Path(each.name).parts[1:]) for each in archive if each.isfile()}
    made = {each for each in packed - tracked if each.parts[0] == "penstock.egg-info"}
    assert packed - made == tracked | {Path("PKG-INFO"), Path("setup.cfg")}


def test_pip_builds_and_installs_the_sources_from_the_sdist(sdist: Path, tmp_path: Path) -> None:
    _run([sys.executable, "-m", "venv", str(tmp_path / "venv")])
    programs = tmp_path / "venv" / "bin"
    _run([*_pip_install(tmp_path / "venv"), str(sdist)])
    reply = json.loads(_run([str(programs / "penstock"), "version", "--json"]))
    assert reply["compiled"] is False
    config = ROOT / "deploy" / "config" / "gateway.yaml"
    assert "is valid" in _run([str(programs / "penstock"), "check", str(config)])

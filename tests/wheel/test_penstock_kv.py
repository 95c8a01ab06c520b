"""Tests of penstock-kv, installed alone with pip from the files in dist/.

`make smoke-wheel` builds and tests the compiled wheel; `make wheel test-wheels` does so for all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.compile.wheel import DIST

ROOT = Path(__file__).parents[2]
WITHOUT_COMPILER = {"CC": "/nonexistent/cc"}
KINDS = {"penstock_kv-*-abi3-*.whl": True, "penstock_kv-*-none-any.whl": False}
"""Patterns of distributions in dist/, and whether what pip installs has the native pump."""


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _found() -> list[str]:
    patterns = [*KINDS, "penstock_kv-*.tar.gz"]
    if os.environ.get("PENSTOCK_ONE_WHEEL"):
        patterns = patterns[:1]
    return [pattern for pattern in patterns if list(DIST.glob(pattern))]


@pytest.fixture(scope="module", params=_found())
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Install one distribution where no C compiler is; return the Python of its environment.
    (distribution,) = DIST.glob(request.param)
    venv = tmp_path_factory.mktemp("engine")
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(venv / "bin" / "pip"), "install", "-q", f"{distribution}[numpy]"]
    subprocess.run(pip, env=_environment() | WITHOUT_COMPILER, check=True, timeout=600)
    return venv / "bin" / "python"


def _run(python: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(python), *arguments]
    return subprocess.run(
        command,
        env=_environment(),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_it_moves_kv_over_tcp_without_the_rest_of_the_project(
    installed: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    program, page = ROOT / "tests" / "kv_without_gateway.py", ROOT / "docs" / "kvtransfer.md"
    done = _run(installed, tmp_path, str(program), str(page))
    assert done.returncode == 0, done.stderr
    pattern = request.node.callspec.params["installed"]
    assert json.loads(done.stdout) == {
        "importable": ["kvtransfer", "penstock_kv"],
        "has_pump": KINDS.get(pattern, False),
    }


def test_it_brings_xxhash_beside_what_an_engine_has(installed: Path, tmp_path: Path) -> None:
    listed = json.loads(_run(installed, tmp_path, "-m", "pip", "list", "--format", "json").stdout)
    names = {package["name"] for package in listed} - {"pip", "setuptools"}
    assert names == {"penstock-kv", "xxhash", "msgspec", "numpy"}


def test_its_connector_names_vllm_where_that_is_missing(installed: Path, tmp_path: Path) -> None:
    done = _run(installed, tmp_path, "-c", "import penstock_kv.vllm")
    assert done.stderr.splitlines()[-1].startswith("ImportError: PenstockConnector needs vLLM 0.32")

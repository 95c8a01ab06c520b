"""Tests that lock files pin and hash every requirement, and contain no registry URL or local
path.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
RUNTIME, COMPILE, DEV = "requirements.lock", "requirements-compile.lock", "requirements-dev.lock"


def pins(lock: str) -> dict[str, tuple[str, list[str]]]:
    # Return (version, hashes) by package name from the text of a lock file.
    text = (ROOT / lock).read_text().replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        if match := re.match(r"([a-z0-9-]+)==(\S+)(.*)", line):
            found[match[1]] = (match[2], re.findall(r"--hash=sha256:[0-9a-f]{64}", match[3]))
    return found


def wanted(extra: str | None = None) -> list[str]:
    # Return the packages that penstock, its extras and penstock-kv require, except each other.
    penstock, kv = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        for folder in ("", "kvtransfer")
    )
    lines = (
        penstock["optional-dependencies"][extra]
        if extra is not None
        else [*penstock["dependencies"], *kv["dependencies"]]
    )
    names = [re.split(r"[<>=\[]", line)[0].replace(".", "-") for line in lines]
    return [name for name in names if name != "penstock-kv"]


@pytest.mark.parametrize("lock", [RUNTIME, COMPILE, DEV])
def test_every_requirement_is_pinned_with_hashes_and_nothing_else_is_said(lock: str) -> None:
    assert all(hashes for _, hashes in pins(lock).values())
    for line in (ROOT / lock).read_text().splitlines():
        assert re.match(r"[a-z0-9-]+==\S+ \\$|    --hash=sha256:|    # |# The following|$", line), (
            line
        )
        assert not re.search(r"://|--index|--find-links|@ |(^|\s)/", line), line


def test_what_the_project_asks_for_is_in_the_locks() -> None:
    runtime = {*wanted(), *wanted("demo"), *wanted("redis")}
    assert runtime <= set(pins(RUNTIME))
    assert runtime | {*wanted("dev")} <= set(pins(DEV))
    assert set(wanted("compile")) <= set(pins(COMPILE))
    assert "setuptools" in pins(RUNTIME), "the project itself is installed without a network"


@pytest.mark.parametrize("lock", [RUNTIME, COMPILE, DEV])
def test_no_lock_names_the_projects_themselves(lock: str) -> None:
    assert not [name for name in pins(lock) if name.startswith("penstock")]


@pytest.mark.parametrize("lock", [RUNTIME, COMPILE])
def test_the_locks_agree(lock: str) -> None:
    few, many = pins(lock), pins(DEV)
    assert {name: many.get(name) for name in few} == few


def _installed_with(names: Iterable[str]) -> set[str]:
    # Return the named packages and all that they require here, from their metadata.
    found: set[str] = set()
    left = [Requirement(name) for name in names]
    while left:
        wanted = left.pop()
        name = canonicalize_name(wanted.name)
        extras = ["", *wanted.extras]
        if name not in found:
            found.add(name)
            left += [
                needed
                for needed in map(Requirement, metadata.requires(name) or ())
                if needed.marker is None
                or any(needed.marker.evaluate({"extra": extra}) for extra in extras)
            ]
    return found


def test_without_extras_at_most_20_other_packages_are_installed() -> None:
    # pyproject.toml asks for numpy only where no wheel with extension modules fits. Before Python
    # 3.11.3, redis-py needs async-timeout too.
    assert len(_installed_with({*wanted()} - {"numpy"}) - {"async-timeout"}) <= 20

"""Tests of the flags that tools/compile/compile.py passes to the C compiler."""

from __future__ import annotations

import pytest

from tools.compile.compile import compiler_environment, flags


@pytest.fixture(autouse=True)
def _no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CFLAGS", "LDFLAGS", "SMALL_CFLAGS"):
        monkeypatch.delenv(name, raising=False)


def test_modules_are_optimized_and_some_packages_for_size() -> None:
    environment = compiler_environment()
    assert "-O2" in environment["CFLAGS"].split()
    assert environment["SMALL_CFLAGS"] == "-Os"
    assert "-s" in environment["LDFLAGS"].split()


def test_chosen_flags_apply_to_all_packages_and_confused_c_classes_stay_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CFLAGS", "-O0 -g0")
    environment = compiler_environment()
    assert environment["CFLAGS"].split() == ["-O0", "-g0", "-Werror=incompatible-pointer-types"]
    assert environment["SMALL_CFLAGS"] == ""


def test_a_build_is_known_by_the_flags_of_compiler_and_linker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = {flags(compiler_environment())}
    for name in ("LDFLAGS", "SMALL_CFLAGS", "CFLAGS"):
        monkeypatch.setenv(name, "-chosen")
        seen.add(flags(compiler_environment()))
    assert len(seen) == 4

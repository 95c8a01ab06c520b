"""Tests what the package penstock-kv adds to the environment of vLLM."""

from __future__ import annotations

import pytest

from tests.real.engines import REAL


def packages(when: str) -> set[str]:
    # Return the packages that deploy/real/install.sh listed before or after it added penstock-kv.
    file = REAL / f"packages-{when}"
    if not file.exists():
        pytest.fail("the real engines are not installed; `make real` does it")
    return set(file.read_text().split())


def test_penstock_kv_adds_itself_and_xxhash_and_changes_no_package() -> None:
    before, after = packages("before"), packages("after")
    assert len(before) > 100, "vLLM has more packages than this"
    assert before <= after
    added = {line.partition("==")[0] for line in after - before}
    assert "penstock-kv" in added
    assert added <= {"penstock-kv", "xxhash"}

"""Tests that a process is prepared for many open files before it opens them."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os, resource, sys
from gateway.util.file_descriptors import reserve_descriptors
soft, hard = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
opened = len(os.listdir("/proc/self/fd"))
number = reserve_descriptors(1000)
[size] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("FDSize")]
left = len(os.listdir("/proc/self/fd")) - opened
print(number, *resource.getrlimit(resource.RLIMIT_NOFILE), size, left)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("soft", "hard", "expected"),
    [(256, 2000, "1000 1000 2000 1024 0"), (256, 300, "300 300 300 512 0")],
)
def test_the_soft_limit_and_the_kernels_table_grow_at_once_and_nothing_stays_open(
    soft: int, hard: int, expected: str
) -> None:
    command = [sys.executable, "-c", SCRIPT, str(soft), str(hard)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_higher_soft_limit_stays() -> None:
    command = [sys.executable, "-c", SCRIPT, "1500", "2000"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1000 1500 2000 1024 0"

"""Skips the RDMA tests if there is no RDMA device. `make rdma` runs them on a virtual one.

If the environment variable PENSTOCK_RDMA is set, they fail instead of being skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvtransfer.transports.rdma.transport import Rdma
from tests.rdma.connection_ends import LinkedEnds

collect_ignore_glob = (
    [] if "PENSTOCK_RDMA" in os.environ or Rdma.unavailable() is None else ["test_*.py"]
)


@pytest.fixture
def ends() -> Iterator[LinkedEnds]:
    linked_ends = LinkedEnds()
    yield linked_ends
    linked_ends.close()

"""These tests want a real RDMA device: `make rdma` runs them on soft-RoCE. On a host without a device they are left
out, unless PENSTOCK_RDMA is set: then a missing device is a failure."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvtransfer.transports.rdma import Rdma
from tests.rdma.ends import Ends

collect_ignore_glob = (
    [] if "PENSTOCK_RDMA" in os.environ or Rdma.unavailable() is None else ["test_*.py"]
)


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()

"""The options of Penstock's connector: the members of vLLM's kv_connector_extra_config."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class ConnectorOptions:
    """The members of kv_connector_extra_config.

    key_file      path of the file with the fleet's key, which is the same at every engine
    host          address to listen on; engines on other hosts connect to it
    lease_s       seconds for which a finished prefill is kept for its decode engine
    timeout_s     seconds for which a decode engine waits for KV
    store         path of the Unix socket of the host's store of KV (kvtransfer/store); none by
                  default
    layerwise     whether KV is sent layer by layer while it is computed; True by default
    trace         path of a file that gets a line per computed or arrived layer, for tests
                  (transfer_trace.py); none by default
    dump          path of a folder to which offered and received KV is written, for tests
                  (kv_dump.py); none by default
    block_report  path of a Unix socket for tests (block_report.py); none by default

    `failure_policy` is vLLM's kv_load_failure_policy. Raises ValueError for a missing or unknown
    member, and for a store with another policy than recompute.
    """

    def __init__(self, members: dict[str, Any], failure_policy: str) -> None:
        values = dict(members)
        path = values.pop("key_file", None)
        if not path:
            raise ValueError(
                "kv_connector_extra_config must contain key_file, the path of the fleet's key"
            )
        self.key = Path(path).read_bytes().strip()
        self.host = str(values.pop("host", "127.0.0.1"))
        self.lease_s = float(values.pop("lease_s", 30.0))
        self.timeout_s = float(values.pop("timeout_s", 30.0))
        self.store = _path(values.pop("store", None))
        self.layerwise = bool(values.pop("layerwise", True))
        self.trace = _path(values.pop("trace", None))
        self.dump = _path(values.pop("dump", None))
        self.block_report = _path(values.pop("block_report", None))
        if values:
            raise ValueError(
                f"kv_connector_extra_config has the unknown member {sorted(values)[0]}"
            )
        if self.store is not None and failure_policy != "recompute":
            raise ValueError(
                "with a store, kv_load_failure_policy must be recompute: a block may leave the "
                f"store before it is loaded, and the policy {failure_policy} fails its request"
            )


def _path(value: object) -> Path | None:
    return Path(str(value)) if value else None

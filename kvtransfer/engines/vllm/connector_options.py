"""The options of Penstock's KV connector, which vLLM passes as kv_connector_extra_config."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class ConnectorOptions:
    """The members of kv_connector_extra_config.

    key_file      path of the file with the fleet's key, which is the same at every engine
    host          address to listen on, to which other engines connect; 127.0.0.1 by default
    lease_s       seconds for which the KV of a finished prefill is kept for a decode engine (30)
    timeout_s     seconds for which a decode engine waits for KV (30)
    store         path of the Unix socket of the host's KV store (kvtransfer/store)
    layerwise     whether KV is sent layer by layer while it is computed; True by default
    trace         for tests: file that gets a line per computed or arrived layer
    dump          for tests: folder to which offered and received KV is written
    block_report  for tests: path of a Unix socket (block_report.py)

    Options without a stated default are off unless they are set.

    Raises ValueError if key_file is missing or a member is unknown, and if a store is used although
    vLLM's kv_load_failure_policy (`failure_policy`) is not "recompute".
    """

    def __init__(self, members: dict[str, Any], failure_policy: str) -> None:
        values = dict(members)
        path = values.pop("key_file", None)
        if not path:
            raise ValueError(
                "set key_file in kv_connector_extra_config to the path of the fleet's key"
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
                f"kv_connector_extra_config has the unknown member {sorted(values)[0]}; remove it"
            )
        if self.store is not None and failure_policy != "recompute":
            raise ValueError(
                f"kv_load_failure_policy is {failure_policy!r}, but a store needs "
                "'recompute': a block can leave the store before it is loaded, and then the "
                "request would fail"
            )


def _path(value: object) -> Path | None:
    return Path(str(value)) if value else None

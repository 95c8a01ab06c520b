"""Transfer: the options of a group that hands KV over. Values only; fleet.py builds from them."""

from __future__ import annotations

from math import inf

import msgspec

from kvtransfer.tls_files import TlsFiles

DIALECTS = ("vllm_nixl", "vllm_push", "mooncake", "sglang", "trtllm")
KEY = "penstock-mock"
DEFAULT_SCALE = 1 / 256
TRANSPORTS = ("auto", "tcp", "shm", "inproc")


class Transfer(msgspec.Struct, frozen=True):
    """How one group hands KV over.

    port           of its agent; 0: any free one
    key            what all agents of a fleet prove to one another that they are of it
    scale          real bytes held per byte of the model's KV
    gbps           speed of its links, gigabits per second, for the unscaled KV; inf: as fast as the bytes really move
    lease_s        how long KV of a pull dialect is kept for a decode group that does not report
    wait_s         how long both sides of a push dialect wait for each other; None: as the engine does
    recompute      what a decode group does when KV does not come; else the request fails
    version        of the engine: what its objects look like and with whom it is compatible
    wire_faults    peers come through a relay at which bytes can be harmed (tcp only)
    bootstrap_port of Mooncake's and SGLang's bootstrap server on prefill groups; 0: any free one
    tls            certificates for its TCP links; None: they are plain
    """

    dialect: str = "vllm_nixl"
    transport: str = "auto"
    port: int = 0
    key: str = KEY
    scale: float = DEFAULT_SCALE
    gbps: float = inf
    lease_s: float = 30.0
    wait_s: float | None = None
    recompute: bool = False
    version: tuple[int, int] = (0, 33)
    bootstrap_port: int = 0
    wire_faults: bool = False
    tls: TlsFiles | None = None

    def checked(self) -> Transfer:
        """Itself. ValueError says which option is wrong."""
        if self.dialect not in DIALECTS:
            raise ValueError(f"unknown dialect {self.dialect!r}: known are {', '.join(DIALECTS)}")
        if self.transport not in TRANSPORTS:
            raise ValueError(
                f"unknown transport {self.transport!r}: known are {', '.join(TRANSPORTS)}"
            )
        if not 0 < self.scale <= 1 or not self.gbps > 0 or not self.lease_s > 0:
            raise ValueError("kv scale lies in (0, 1]; link speed and lease are positive")
        if self.wait_s is not None and not self.wait_s > 0:
            raise ValueError(f"legs wait for each other for a time above 0, not {self.wait_s}")
        if self.tls is not None and self.transport not in ("auto", "tcp"):
            raise ValueError(f"TLS is for links over TCP, not for {self.transport}")
        return self

"""The options of a mock engine for moving KV: between engines, and to or from a KV store."""

from __future__ import annotations

from math import inf

import msgspec

from kvtransfer.util.tls_files import TlsFiles

DIALECTS = ("vllm_nixl", "vllm_push", "penstock", "mooncake", "sglang", "trtllm")
KEY = "penstock-mock"
DEFAULT_SCALE = 1 / 256
TRANSPORTS = ("auto", "tcp", "shm", "inproc")


class TransferSpec(msgspec.Struct, frozen=True):
    """The KV transfer options of one mock engine.

    port            port of its KV transfer agent; 0: any free port
    key             secret that all agents of a fleet share
    scale           stored bytes per byte of the real model's KV, in (0, 1]
    gbps            simulated link speed in gigabits per second, for the real model's KV; inf: no
                    limit
    lease_s         seconds for which a prefill engine keeps KV for a decode engine; a heartbeat of
                    the decode engine extends them
    wait_s          maximum seconds that each engine waits for the other one if the prefill engine
                    writes the KV (push); None: the value of the real engine
    recompute       what a decode engine does if KV fails to arrive. True: compute it; False: fail
                    the request
    version         version of the imitated engine, which decides formats and compatibility
    wire_faults     whether peers connect through a relay that can inject faults (tcp only)
    bootstrap_port  port of a prefill engine's bootstrap server (Mooncake, SGLang); 0: any free port
    tls             certificates for its TCP connections; None: no TLS
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

    def validate(self) -> TransferSpec:
        """Check these options, and return them unchanged. Raises ValueError if one is invalid."""
        if self.dialect not in DIALECTS:
            raise ValueError(
                f"unknown handoff dialect {self.dialect!r}; known dialects: {', '.join(DIALECTS)}"
            )
        if self.transport not in TRANSPORTS:
            raise ValueError(
                f"unknown KV transport {self.transport!r}; known transports: "
                f"{', '.join(TRANSPORTS)}"
            )
        if not 0 < self.scale <= 1 or not self.gbps > 0 or not self.lease_s > 0:
            raise ValueError(
                "invalid KV options: scale must be above 0 and at most 1, gbps and lease_s "
                f"above 0, got {self.scale}, {self.gbps} and {self.lease_s}"
            )
        if self.wait_s is not None and not self.wait_s > 0:
            raise ValueError(f"the handoff timeout must be above 0 seconds, not {self.wait_s}")
        if self.tls is not None and self.transport not in ("auto", "tcp"):
            raise ValueError(
                f"TLS for KV transfers requires the transport tcp or auto, not {self.transport}"
            )
        return self


class StoreSpec(msgspec.Struct, frozen=True):
    """How a mock engine uses its host's store of KV blocks.

    path       path of the store's Unix socket
    gbps       simulated speed between host memory and the engine's GPUs, in gigabits per second for
               the real model's KV; inf: no limit
    disk_gbps  simulated speed from disk to host memory, in the same unit
    scale      stored bytes per byte of the real model's KV, in (0, 1]
    """

    path: str
    gbps: float = 200.0
    disk_gbps: float = 40.0
    scale: float = DEFAULT_SCALE

    @property
    def bytes_s(self) -> float:
        return self.gbps * 1e9 / 8

    @property
    def disk_bytes_s(self) -> float:
        return self.disk_gbps * 1e9 / 8

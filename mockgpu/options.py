"""The longer options of `penstock mock`, above all those that make its groups halves of split requests.

cli.py has the others.
"""

from __future__ import annotations

from typing import Annotated

import typer

Port = Annotated[
    int,
    typer.Option(
        min=0, max=65535, help="Port of the first group; the others follow. 0: any free ports."
    ),
]
Tp = Annotated[
    int | None, typer.Option(min=1, help="GPUs per group. Default: the first of 1, 4, 8 that fits.")
]
KvTokens = Annotated[
    int | None, typer.Option(min=16, help="Tokens of KV cache, instead of what memory leaves.")
]
DialectName = Annotated[
    str | None,
    typer.Option(
        help="Be half of split requests, as vllm_nixl, vllm_push, mooncake, sglang or trtllm."
    ),
]
KvTransport = Annotated[
    str, typer.Option(help="auto, tcp, shm or inproc (groups of this process only).")
]
KvPort = Annotated[
    int,
    typer.Option(
        min=0,
        max=65535,
        help="Port of the first group's agent; the others follow. 0: any free ports.",
    ),
]
KvKey = Annotated[str, typer.Option(help="What all groups of a fleet share and nobody else knows.")]
KvTls = Annotated[
    str | None,
    typer.Option(
        help="Directory with tls.crt, tls.key and ca.crt: TLS for KV over TCP, at both ends."
    ),
]
KvScale = Annotated[float, typer.Option(help="Bytes held per byte of the model's KV, up to 1.")]
KvGbps = Annotated[
    float, typer.Option(help="Link speed for the unscaled KV, gigabits per second. 0: no pacing.")
]
KvLease = Annotated[
    float, typer.Option(help="Seconds that KV is kept for a decode group to fetch.")
]
HandoffTimeout = Annotated[
    float | None,
    typer.Option(help="Seconds that legs wait for each other. Default: as the engine does."),
]
LoadFailurePolicy = Annotated[
    str, typer.Option(help="When KV does not come: fail the request, or recompute.")
]
EngineVersion = Annotated[str, typer.Option(help="Whose objects: 0.20 to 0.33.")]
WireFaults = Annotated[
    bool, typer.Option(help="Let faults of the wire be set: agents are reached through a relay.")
]
ChaosPort = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        help="Let `penstock chaos` set faults, at this port of 127.0.0.1. 0: a free one.",
    ),
]
BootstrapPort = Annotated[
    int,
    typer.Option(
        min=0,
        max=65535,
        help="Mooncake's and SGLang's bootstrap server of the first group. 0: any free ports.",
    ),
]

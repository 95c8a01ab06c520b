"""The options of `penstock mock`, by type."""

from __future__ import annotations

from typing import Annotated

import typer

Port = Annotated[
    int,
    typer.Option(
        min=0, max=65535, help="Port of the first group; the others follow. 0: free ports."
    ),
]
Tp = Annotated[
    int | None, typer.Option(min=1, help="GPUs per group. Default: the first of 1, 4, 8 that fits.")
]
KvTokens = Annotated[
    int | None, typer.Option(min=16, help="Tokens of KV cache. Default: what memory leaves.")
]
DialectName = Annotated[
    str | None,
    typer.Option(
        help="Serve one half of split requests: vllm_nixl, vllm_push, mooncake, sglang or trtllm."
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
        help="Port of the first group's agent; the others follow. 0: free ports.",
    ),
]
KvKey = Annotated[str, typer.Option(help="Secret that all groups of a fleet share.")]
KvTls = Annotated[
    str | None,
    typer.Option(
        help="Directory with tls.crt, tls.key and ca.crt: TLS for KV over TCP, at both ends."
    ),
]
KvScale = Annotated[float, typer.Option(help="Real bytes per byte of the model's KV, up to 1.")]
KvGbps = Annotated[
    float, typer.Option(help="Link speed for the unscaled KV, gigabits per second. 0: no pacing.")
]
KvLease = Annotated[float, typer.Option(help="Seconds to keep KV for a decode group.")]
HandoffTimeout = Annotated[
    float | None,
    typer.Option(help="Seconds that legs wait for each other. Default: the engine's."),
]
LoadFailurePolicy = Annotated[
    str, typer.Option(help="If KV does not arrive: fail the request, or recompute.")
]
EngineVersion = Annotated[str, typer.Option(help="Engine version to imitate: 0.20 to 0.33.")]
KvEventsPort = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        help="Publish KV events over ZeroMQ from this port on: two ports per group, for events and "
        "replays. 0: free ports. Default: no events.",
    ),
]
WireFaults = Annotated[
    bool, typer.Option(help="Allow wire faults: peers reach agents through a relay.")
]
ChaosPort = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        help="Port on 127.0.0.1 for `penstock chaos` to set faults. 0: a free one.",
    ),
]
BootstrapPort = Annotated[
    int,
    typer.Option(
        min=0,
        max=65535,
        help="Port of the first group's bootstrap server (Mooncake, SGLang). 0: free ports.",
    ),
]
Groups = Annotated[int, typer.Option(min=1, max=256, help="TP groups to serve, one port each.")]
ModelName = Annotated[str, typer.Option(help="Model to serve, by its short or full name.")]
GpuName = Annotated[str, typer.Option(help="a100, h100, h200, b200 or l40s.")]
Role = Annotated[str, typer.Option(help="both, prefill or decode.")]
Speed = Annotated[str, typer.Option(help="10: ten times as fast. 0 or inf: no waiting.")]
Seed = Annotated[int, typer.Option(help="Random seed for faults with a chance.")]
FaultSpec = Annotated[
    str, typer.Option(help="Faults from the start, e.g. '5xx@0.1,stall:after=3'.")
]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
ProfileName = Annotated[str, typer.Option(help="Software generation: 2026, 2023 or harbor.")]
MaxNumSeqs = Annotated[int, typer.Option(min=1, help="Maximum number of running sequences.")]
MaxNumBatchedTokens = Annotated[
    int, typer.Option(min=1, help="Maximum tokens per step: the prefill chunk.")
]
MaxQueued = Annotated[
    int | None, typer.Option(min=1, help="Answer 503 above this many waiting requests.")
]
KeepAlive = Annotated[float, typer.Option(help="Seconds before an idle connection is closed.")]
Lacks = Annotated[
    list[str] | None,
    typer.Option(help="API that the engine does not have: messages or responses; repeatable."),
]
MayEndFrom = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Answers with at least this token limit may end by themselves, as a model's do. "
        "Default: every limit is met exactly.",
    ),
]
CachedDetails = Annotated[bool, typer.Option(help="Report cached_tokens in usage.")]
StoresResponses = Annotated[
    bool, typer.Option(help="Keep responses, as vLLM with VLLM_ENABLE_RESPONSES_API_STORE=1.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object per group.")]

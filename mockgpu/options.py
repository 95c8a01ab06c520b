"""Types of the command-line options of `penstock mock`, with their help texts."""

from __future__ import annotations

from typing import Annotated

from command_line import Option

Port = Annotated[
    int,
    Option(
        min=0,
        max=65535,
        help="Port of the first engine; the following engines get the next ports. 0: free ports.",
    ),
]
Tp = Annotated[
    int | None,
    Option(
        min=1,
        help="Number of GPUs per engine (TP). Default: the first of 1, 4 and 8 "
        "on which the model fits.",
    ),
]
Pp = Annotated[int, Option("--pp", min=1, help="Number of pipeline stages per engine (PP).")]
Ep = Annotated[
    int,
    Option(
        "--ep",
        min=1,
        help="Number of ranks over which the experts of an MoE model are spread (EP).",
    ),
]
Dp = Annotated[
    int,
    Option("--dp", min=1, help="Number of ranks with data-parallel attention in one engine (DP)."),
]
Cp = Annotated[
    int,
    Option(
        "--cp",
        min=1,
        help="Number of ranks that divide the tokens of a prompt (context parallel, CP).",
    ),
]
EpSkew = Annotated[
    float,
    Option(
        "--ep-skew",
        min=1,
        max=64,
        help="Load of the busiest expert rank, divided by the mean load of all ranks.",
    ),
]
KvTokens = Annotated[
    int | None,
    Option(min=16, help="Size of the KV cache in tokens. Default: all free memory."),
]
DialectName = Annotated[
    str | None,
    Option(
        help="Serve one half of split requests, by the handoff protocol of this engine: "
        "vllm_nixl, vllm_push, penstock, mooncake, sglang or trtllm."
    ),
]
KvTransport = Annotated[
    str,
    Option(help="Transport that moves KV: auto, tcp, shm or inproc (within this process)."),
]
KvPort = Annotated[
    int,
    Option(
        min=0,
        max=65535,
        help="Port of the first engine's KV transfer agent; the following engines get the next "
        "ports. 0: free ports.",
    ),
]
KvKey = Annotated[str, Option(help="Secret shared by the KV transfer agents of all engines.")]
KvTls = Annotated[
    str | None,
    Option(
        help="Directory with tls.crt, tls.key and ca.crt, for TLS of KV transfers over TCP at "
        "both ends."
    ),
]
KvScale = Annotated[
    float,
    Option(
        help="Share (above 0, at most 1) of the model's KV bytes that a mock engine really stores "
        "and sends. A small share saves memory."
    ),
]
KvGbps = Annotated[
    float, Option(help="Simulated KV link speed in gigabits per second. 0: no limit.")
]
KvLease = Annotated[
    float, Option(help="Seconds for which a prefill engine keeps KV for its decode engine.")
]
HandoffTimeout = Annotated[
    float | None,
    Option(
        help="Seconds that the prefill and the decode engine wait for each other. Default: "
        "those of the imitated engine."
    ),
]
LoadFailurePolicy = Annotated[
    str,
    Option(
        help="What to do if the KV of a request does not arrive: fail (the "
        "request fails) or recompute."
    ),
]
EngineVersion = Annotated[str, Option(help="vLLM version to imitate: 0.20 to 0.33.")]
DpRanks = Annotated[
    int,
    Option(
        min=1,
        max=64,
        help="Number of data-parallel ranks per group that requests can address, each with its "
        "own KV cache.",
    ),
]
DpLockstep = Annotated[
    bool | None,
    Option(
        "--dp-lockstep/--no-dp-lockstep",
        help="Whether the steps of all --dp-ranks begin and end together. Default: yes if the "
        "ranks share their experts (--ep above --tp), else no.",
    ),
]
KvEventsPort = Annotated[
    int | None,
    Option(
        min=0,
        max=65535,
        help="Publish KV events over ZeroMQ from this port on: two ports per rank, for events "
        "and replays. 0: free ports. Default: no events.",
    ),
]
KvStore = Annotated[
    str | None,
    Option(help="Unix socket of this host's store of KV blocks (python -m kvtransfer.store)."),
]
KvStoreGbps = Annotated[
    str,
    Option(
        help="Simulated speeds of the store's memory and disk in gigabits per second. 0: no limit."
    ),
]
WireFaults = Annotated[
    bool,
    Option(
        help="Allow `penstock chaos` to inject faults into KV connections, "
        "which then pass through a relay."
    ),
]
ChaosPort = Annotated[
    int | None,
    Option(
        min=0,
        max=65535,
        help="Port on 127.0.0.1 at which `penstock chaos` sets faults. 0: a free port.",
    ),
]
BootstrapPort = Annotated[
    int,
    Option(
        min=0,
        max=65535,
        help="Port of the first engine's bootstrap server (Mooncake, SGLang). 0: free ports.",
    ),
]
Groups = Annotated[
    int, Option(min=1, max=256, help="Number of engines (TP groups) to serve, one port each.")
]
ModelName = Annotated[str, Option(help="Model to serve, by its short or full name.")]
GpuName = Annotated[str, Option(help="GPU to simulate: a100, h100, h200, b200 or l40s.")]
Role = Annotated[str, Option(help="Kind of requests to serve: both, prefill or decode.")]
Speed = Annotated[
    str,
    Option(
        help="Factor by which simulated time is faster than real time, such as "
        "10. 0 or inf: no waiting."
    ),
]
Seed = Annotated[
    int,
    Option(help="Random seed for faults with a probability: it decides which requests they hit."),
]
FaultSpec = Annotated[
    str, Option(help="Faults to inject from the start, for example '5xx@0.1,stall:after=3'.")
]
Host = Annotated[str, Option(help="Address to listen on.")]
ProfileName = Annotated[
    str,
    Option(
        help="Engine software whose step times are simulated: 2026 (current), 2023, or harbor "
        "(2023 with a slow link between GPUs above TP 4)."
    ),
]
MaxNumSeqs = Annotated[
    int, Option(min=1, help="Maximum number of sequences that run at the same time.")
]
MaxNumBatchedTokens = Annotated[
    int,
    Option(min=1, help="Maximum number of tokens per step, of prefill and decode together."),
]
MaxQueued = Annotated[
    int | None,
    Option(
        min=1,
        help="Answer new requests with 503 while more than this many are waiting. Default: never.",
    ),
]
KeepAlive = Annotated[
    float, Option(help="Seconds after which an idle client connection is closed.")
]
Lacks = Annotated[
    list[str] | None,
    Option(
        help="API that the engine does not serve: messages or responses; repeat the "
        "option for both."
    ),
]
MayEndFrom = Annotated[
    int | None,
    Option(
        min=1,
        help="Let requests with max_tokens of at least this number get shorter answers, as from a "
        "real model. Default: every answer has max_tokens tokens.",
    ),
]
AnswerNoise = Annotated[
    float,
    Option(
        min=0.0,
        max=1.0,
        help="Share of prompts (0 to 1) to which this engine answers differently from other "
        "engines, as if its weights had a lower precision.",
    ),
]
CachedDetails = Annotated[
    bool, Option(help="Report the number of cached prompt tokens in the usage of responses.")
]
StoresResponses = Annotated[
    bool,
    Option(
        help="Store responses for later requests, like vLLM with VLLM_ENABLE_RESPONSES_API_STORE=1."
    ),
]
AsJson = Annotated[
    bool,
    Option("--json", help="Print one line of JSON per engine (TP group) instead of text."),
]

"""The names, ranges and help texts of the command-line options of `penstock mock`."""

from __future__ import annotations

from typing import Annotated

from command_line import Option

Port = Annotated[
    int,
    Option(
        min=0,
        max=65535,
        help="Port of the first engine; the other engines use the following ports. 0: free ports.",
    ),
]
Tp = Annotated[
    int | None,
    Option(
        min=1,
        help="Number of GPUs per engine (tensor parallelism, TP). Default: the first of 1, 4 and "
        "8 on which the model fits.",
    ),
]
Pp = Annotated[
    int,
    Option(
        "--pp", min=1, help=("Number of pipeline stages per engine (pipeline parallelism, PP).")
    ),
]
Ep = Annotated[
    int,
    Option(
        "--ep",
        min=1,
        help=(
            "Number of ranks over which the experts of an MoE model are spread (expert "
            "parallelism, EP)."
        ),
    ),
]
Dp = Annotated[
    int,
    Option(
        "--dp",
        min=1,
        help=(
            "Number of ranks with data-parallel (DP) attention in one engine. Requests cannot "
            "address them."
        ),
    ),
]
Cp = Annotated[
    int,
    Option(
        "--cp",
        min=1,
        help="Number of ranks that divide the tokens of a prompt (context parallelism, CP).",
    ),
]
EpSkew = Annotated[
    float,
    Option(
        "--ep-skew",
        min=1,
        max=64,
        help=(
            "Load of the busiest expert rank, divided by the mean load of all expert ranks. 1: "
            "equal loads."
        ),
    ),
]
KvTokens = Annotated[
    int | None,
    Option(
        min=16,
        help=(
            "Size of the KV cache in tokens. Default: all GPU memory that the model leaves free."
        ),
    ),
]
DialectName = Annotated[
    str | None,
    Option(
        help="Serve the prefill or decode half of split requests, with the handoff protocol of "
        "this engine: vllm_nixl, vllm_push, penstock, mooncake, sglang or trtllm."
    ),
]
KvTransport = Annotated[
    str,
    Option(
        help=(
            "How KV is transferred: tcp, shm (shared memory), inproc (within this process) or auto "
            "(the best)."
        )
    ),
]
KvPort = Annotated[
    int,
    Option(
        min=0,
        max=65535,
        help="Port of the first engine's KV transfer agent; the other engines use the following "
        "ports. 0: free ports.",
    ),
]
KvKey = Annotated[
    str,
    Option(help="Secret with which the KV transfer agents of all engines authenticate each other."),
]
KvTls = Annotated[
    str | None,
    Option(
        help="Directory with tls.crt, tls.key and ca.crt, to encrypt and authenticate KV "
        "transfers over TCP."
    ),
]
KvScale = Annotated[
    float,
    Option(
        help="Fraction (above 0, at most 1) of the model's KV bytes that a mock engine really "
        "stores and sends. A small fraction saves memory."
    ),
]
KvGbps = Annotated[
    float,
    Option(
        help="Simulated speed at which an engine receives KV, in gigabits per second. 0: no limit."
    ),
]
KvLease = Annotated[
    float,
    Option(
        help=("Seconds for which a prefill engine keeps KV until its decode engine fetches it.")
    ),
]
HandoffTimeout = Annotated[
    float | None,
    Option(
        help="Maximum seconds that the prefill and the decode engine wait for each other. "
        "Default: the value of the imitated engine."
    ),
]
LoadFailurePolicy = Annotated[
    str,
    Option(
        help="What to do if the KV of a request does not arrive. fail: fail the request; "
        "recompute: compute the KV again."
    ),
]
EngineVersion = Annotated[str, Option(help="vLLM version to imitate: 0.20 to 0.33.")]
DpRanks = Annotated[
    int,
    Option(
        min=1,
        max=64,
        help="Number of data-parallel ranks per engine that requests can address, each with its "
        "own KV cache.",
    ),
]
DpLockstep = Annotated[
    bool | None,
    Option(
        "--dp-lockstep/--no-dp-lockstep",
        help="Whether the steps of all --dp-ranks begin and end together. Default: yes if the "
        "ranks share their experts (--ep above --tp), otherwise no.",
    ),
]
KvEventsPort = Annotated[
    int | None,
    Option(
        min=0,
        max=65535,
        help="First port for KV events over ZeroMQ; each rank uses two ports, for events and for "
        "replays. 0: free ports. Default: no events.",
    ),
]
KvStore = Annotated[
    str | None,
    Option(
        help=("Path of the Unix socket of this host's KV block store (python -m kvtransfer.store).")
    ),
]
KvStoreGbps = Annotated[
    str,
    Option(
        help=(
            "Simulated speeds of the KV store's memory and disk in gigabits per second, such as "
            "200,40. 0: no limit."
        )
    ),
]
WireFaults = Annotated[
    bool,
    Option(
        help="Route KV connections through a relay, so that `penstock chaos` can inject faults "
        "into them."
    ),
]
ChaosPort = Annotated[
    int | None,
    Option(
        min=0,
        max=65535,
        help=(
            "Port on 127.0.0.1 of the server with which `penstock chaos` sets faults. 0: a free "
            "port."
        ),
    ),
]
BootstrapPort = Annotated[
    int,
    Option(
        min=0,
        max=65535,
        help=(
            "Port of the first engine's bootstrap server, where decode engines find it "
            "(Mooncake, SGLang). 0: free ports."
        ),
    ),
]
Groups = Annotated[
    int,
    Option(min=1, max=256, help=("Number of engines (TP groups) to serve. Each has its own port.")),
]
ModelName = Annotated[
    str,
    Option(help="Model to simulate and serve, by its short or full name, such as llama-3.1-8b."),
]
GpuName = Annotated[str, Option(help="GPU to simulate: a100, h100, h200, b200 or l40s.")]
Role = Annotated[
    str,
    Option(
        help=(
            "Requests to serve: both (whole requests), or one half of split requests (prefill or "
            "decode)."
        )
    ),
]
Speed = Annotated[
    str,
    Option(
        help="Factor by which simulated time is faster than real time, such as 10. 0 or inf: no "
        "waiting."
    ),
]
Seed = Annotated[
    int,
    Option(
        help=("Random seed that decides which requests are affected by faults with a probability.")
    ),
]
FaultSpec = Annotated[
    str,
    Option(
        help=(
            "Faults to inject from the start. Example: '5xx@0.1,stall:after=3' fails 10 % of the "
            "requests and stalls streams after 3 tokens."
        )
    ),
]
Host = Annotated[str, Option(help="Address on which all engines listen.")]
ProfileName = Annotated[
    str,
    Option(
        help="Engine software whose step times are simulated. 2026: current; 2023; harbor: 2023 "
        "with slow links between GPUs above TP 4."
    ),
]
MaxNumSeqs = Annotated[
    int,
    Option(
        min=1, help=("Maximum number of sequences that one step computes (vLLM's max_num_seqs).")
    ),
]
MaxNumBatchedTokens = Annotated[
    int,
    Option(
        min=1,
        help=(
            "Maximum number of prefill and decode tokens per step (vLLM's max_num_batched_tokens)."
        ),
    ),
]
MaxQueued = Annotated[
    int | None,
    Option(
        min=1,
        help="Reject new requests with status 503 while at least this many wait. Default: never.",
    ),
]
KeepAlive = Annotated[
    float, Option(help="Seconds after which an idle client connection is closed.")
]
Lacks = Annotated[
    list[str] | None,
    Option(
        help="API that the engine does not serve: messages or responses. Repeat the option for "
        "both."
    ),
]
MayEndFrom = Annotated[
    int | None,
    Option(
        min=1,
        help="Let an answer end early, like a real model's, if max_tokens is at least this "
        "number. Default: every answer has max_tokens tokens.",
    ),
]
AnswerNoise = Annotated[
    float,
    Option(
        min=0.0,
        max=1.0,
        help="Fraction of prompts (0 to 1) to which this engine answers differently from other "
        "engines, as if its weights had a lower precision.",
    ),
]
CachedDetails = Annotated[
    bool, Option(help="Report the number of cached prompt tokens in the usage of responses.")
]
StoresResponses = Annotated[
    bool,
    Option(
        help=(
            "Store responses for later requests, like vLLM with VLLM_ENABLE_RESPONSES_API_STORE=1."
        )
    ),
]
AsJson = Annotated[
    bool,
    Option(
        "--json",
        help=("Print one JSON object per engine (TP group), one per line, instead of text."),
    ),
]

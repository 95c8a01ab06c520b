"""The command `penstock mock`: checks its options, and serves mock engines until interrupted."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from command_line import run_command, write_line
from kvtransfer.util.tls_files import TlsFiles
from mockgpu.chaos_server import run_chaos_server
from mockgpu.cli_options import (
    AnswerNoise,
    AsJson,
    BootstrapPort,
    CachedDetails,
    ChaosPort,
    Cp,
    DialectName,
    Dp,
    DpLockstep,
    DpRanks,
    EngineVersion,
    Ep,
    EpSkew,
    FaultSpec,
    GpuName,
    Groups,
    HandoffTimeout,
    Host,
    KeepAlive,
    KvEventsPort,
    KvGbps,
    KvKey,
    KvLease,
    KvPort,
    KvScale,
    KvStore,
    KvStoreGbps,
    KvTls,
    KvTokens,
    KvTransport,
    Lacks,
    LoadFailurePolicy,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    MaxQueued,
    MayEndFrom,
    ModelName,
    Port,
    Pp,
    ProfileName,
    Role,
    Seed,
    Speed,
    StoresResponses,
    Tp,
    WireFaults,
)
from mockgpu.fault_grammar import FaultError
from mockgpu.fleet import KEEP_ALIVE_S, FleetGroup, run_fleet
from mockgpu.kv_events.numbered_event_batches import KvEventSpec
from mockgpu.kv_options import DEFAULT_SCALE, KEY, StoreSpec, TransferSpec
from mockgpu.timing.roofline import profile_named
from mockgpu.tp_group import GroupSpec
from policies.sizing.gpu_memory import kv_capacity_tokens
from policies.sizing.gpus import gpu_named
from policies.sizing.layout_facts import facts_of
from policies.sizing.model_shapes import model_named
from policies.sizing.parallelism_rules import MAX_SIZE, PlannedGroup, layout_findings


@contextmanager
def _exit_on_error() -> Iterator[None]:
    # Print an error as one line and exit: status 2 for wrong options, 1 for a port in use.
    try:
        yield
    except (ValueError, FaultError) as error:
        write_line(f"error: {error}", err=True)
        raise SystemExit(2) from None
    except OSError as error:
        write_line(f"error: cannot listen: {error.strerror or error}", err=True)
        raise SystemExit(1) from None


@_exit_on_error()
def mock(
    port: Port,
    groups: Groups = 1,
    model: ModelName = "demo-8b",
    gpu: GpuName = "h100",
    tp: Tp = None,
    pp: Pp = 1,
    ep: Ep = 1,
    dp: Dp = 1,
    cp: Cp = 1,
    ep_skew: EpSkew = 1.0,
    role: Role = "both",
    speed: Speed = "1",
    seed: Seed = 0,
    fault: FaultSpec = "",
    host: Host = "127.0.0.1",
    profile: ProfileName = "2026",
    max_num_seqs: MaxNumSeqs = 256,
    max_num_batched_tokens: MaxNumBatchedTokens = 8192,
    kv_tokens: KvTokens = None,
    max_queued: MaxQueued = None,
    keep_alive: KeepAlive = KEEP_ALIVE_S,
    cached_details: CachedDetails = True,
    responses_store: StoresResponses = False,
    lacks: Lacks = None,
    may_end_from: MayEndFrom = None,
    answer_noise: AnswerNoise = 0.0,
    dialect: DialectName = None,
    kv_transport: KvTransport = "auto",
    kv_port: KvPort = 0,
    kv_key: KvKey = KEY,
    kv_tls: KvTls = None,
    kv_scale: KvScale = DEFAULT_SCALE,
    kv_gbps: KvGbps = 0.0,
    kv_lease: KvLease = 30.0,
    kv_store: KvStore = None,
    kv_store_gbps: KvStoreGbps = "200,40",
    handoff_timeout: HandoffTimeout = None,
    kv_load_failure_policy: LoadFailurePolicy = "fail",
    engine_version: EngineVersion = "0.33",
    bootstrap_port: BootstrapPort = 0,
    wire_faults: WireFaults = False,
    kv_events_port: KvEventsPort = None,
    dp_ranks: DpRanks = 1,
    dp_lockstep: DpLockstep = None,
    chaos_port: ChaosPort = None,
    as_json: AsJson = False,
) -> None:
    """Serve simulated LLM engines (TP groups) without a GPU, with vLLM's HTTP API."""
    _check_ports(groups, port, kv_port, bootstrap_port)
    spec = _spec(model, gpu, tp, role, profile, speed, dp_ranks, dp_lockstep, dialect)
    spec = _with_layout(spec, (pp, ep, dp, cp), ep_skew, has_dialect=dialect is not None)
    limits = max_num_seqs, max_num_batched_tokens, kv_tokens, max_queued, cached_details, lacks
    spec = _answering(_limited(spec, *limits), responses_store, may_end_from, answer_noise)
    spec = _with_store(spec, kv_store, kv_store_gbps, kv_scale)
    specs = _publishing(spec, groups, kv_events_port, dialect, _version(engine_version))
    link = (kv_transport, kv_port, kv_key, kv_scale, kv_gbps or inf, kv_lease, handoff_timeout)
    checks = (kv_load_failure_policy, engine_version, kv_tls)
    specs = _halves(specs, dialect, link, _checked(*checks, bootstrap_port, wire_faults))
    uvloop.run(_serve(specs, host, port, fault, seed, keep_alive, chaos_port, as_json))


def _answering(
    spec: GroupSpec, stores_responses: bool, may_end_from: int | None, answer_noise: float
) -> GroupSpec:
    return msgspec.structs.replace(
        spec,
        stores_responses=stores_responses,
        may_end_from=may_end_from,
        answer_noise=answer_noise,
    )


def _with_store(spec: GroupSpec, path: str | None, gbps: str, scale: float) -> GroupSpec:
    # Return the spec with a store of KV, if a path is given. Raises ValueError if it is unusable.
    if path is None:
        return spec
    try:
        memory_gbps, disk_gbps = (float(number) or inf for number in gbps.split(","))
    except ValueError:
        memory_gbps = disk_gbps = -1.0
    if not min(memory_gbps, disk_gbps) > 0:
        raise ValueError(
            "--kv-store-gbps must be two speeds in Gbit/s such as 200,40 (memory, disk), not "
            f"{gbps!r}"
        )
    if not 0 < scale <= 1:
        raise ValueError(f"--kv-scale must be above 0 and at most 1, not {scale}")
    if spec.layout.gpus > spec.tp or spec.ranks > 1:
        raise ValueError(
            "--kv-store supports only tensor parallelism: remove --pp, --dp, --cp and --dp-ranks"
        )
    store = StoreSpec(path, memory_gbps, disk_gbps, scale)
    return msgspec.structs.replace(spec, kv_store=store)


def _checked(
    policy: str, version: str, tls: str | None, bootstrap_port: int, wire_faults: bool
) -> dict[str, Any]:
    # Return further options of a KV transfer. Raises ValueError for a wrong one.
    return {
        "recompute": _recompute(policy),
        "version": _version(version),
        "tls": _tls(tls),
        "bootstrap_port": bootstrap_port,
        "wire_faults": wire_faults,
    }


def _with_layout(
    spec: GroupSpec, sizes: tuple[int, int, int, int], skew: float, *, has_dialect: bool
) -> GroupSpec:
    # Return the spec with PP, EP, DP and CP. Raises ValueError if no engine starts so.
    pp, ep, dp, cp = sizes
    if max(*sizes, skew) == 1:
        return spec
    wide = msgspec.structs.replace(spec, pp=pp, ep=ep, dp=dp, cp=cp, ep_skew=skew)
    if has_dialect and pp * dp * cp > 1:
        raise ValueError("--dialect supports only tensor parallelism: remove --pp, --dp and --cp")
    if spec.ranks > 1 and dp > 1:
        raise ValueError(
            "--dp-ranks and --dp both set the number of data-parallel ranks: use only one of them"
        )
    if wide.shares_experts and pp * cp > 1:
        raise ValueError(
            "--dp-ranks with shared experts (--ep above --tp) cannot be combined with --pp or --cp"
        )
    planned = PlannedGroup(wide.layout, facts_of(wide.model), domain=MAX_SIZE)
    for finding in layout_findings(planned):
        if finding.is_error:
            raise ValueError(finding.text)
    return wide


def _limited(
    spec: GroupSpec,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    kv_tokens: int | None,
    max_queued: int | None,
    cached_details: bool,
    lacks: Sequence[str] | None,
) -> GroupSpec:
    # Return the spec with these limits set.
    #
    # Raises ValueError if the model does not fit in memory.
    if unknown := set(lacks or ()) - {"messages", "responses"}:
        raise ValueError(f"unknown API {min(unknown)!r}; known APIs: messages, responses")
    spec = msgspec.structs.replace(
        spec,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(max_num_batched_tokens, max_num_seqs),
        kv_tokens=kv_tokens,
        max_queued=max_queued,
        cached_details=cached_details,
        lacks=tuple(lacks or ()),
    )
    _ = spec.capacity_tokens
    return spec


def _check_ports(groups: int, port: int, kv_port: int, bootstrap_port: int) -> None:
    # Raise ValueError if the groups' consecutive ports would exceed 65535.
    firsts = {"--port": port, "--kv-port": kv_port, "--bootstrap-port": bootstrap_port}
    for option, first in firsts.items():
        if first and first + groups - 1 > 65535:
            raise ValueError(
                f"{option} {first}: {groups} groups need ports up to {first + groups - 1}, but "
                "65535 is the last port"
            )


def _spec(
    model: str,
    gpu: str,
    tp: int | None,
    role: str,
    profile: str,
    speed: str,
    ranks: int,
    lockstep: bool | None,
    dialect: str | None,
) -> GroupSpec:
    # Build a group's spec from the options that name known things, and its data-parallel ranks.
    #
    # Raises ValueError if a name is unknown, and for ranks that no engine has.
    shape, card = model_named(model), gpu_named(gpu)
    if role not in ("both", "prefill", "decode"):
        raise ValueError(f"unknown role {role!r}; known roles: both, prefill, decode")
    if tp is None:
        tp = next((ranks for ranks in (1, 4) if kv_capacity_tokens(shape, card, ranks)), 8)
    try:
        factor = float(speed) or inf
    except ValueError:
        factor = -1.0
    if not factor > 0:
        raise ValueError(f"--speed must be a positive number, not {speed!r}")
    spec = GroupSpec(model, shape, card, tp, role, profile_named(profile), factor)
    return _with_ranks(spec, ranks, lockstep, dialect)


def _tls(directory: str | None) -> TlsFiles | None:
    # Return the files of a Kubernetes TLS secret in this directory; None without a directory.
    #
    # Raises ValueError for "", because it would mean the working directory.
    if directory is None:
        return None
    if not directory:
        raise ValueError("--kv-tls must be the path of a directory")
    certificate, key, ca = (
        str(Path(directory) / name) for name in ("tls.crt", "tls.key", "ca.crt")
    )
    return TlsFiles(certificate=certificate, key=key, ca=ca)


def _recompute(policy: str) -> bool:
    if policy not in ("fail", "recompute"):
        raise ValueError(
            f"unknown action {policy!r} for KV that fails to arrive; known actions: fail, recompute"
        )
    return policy == "recompute"


def _version(text: str) -> tuple[int, int]:
    major, dot, minor = text.partition(".")
    if not (dot and major.isdecimal() and minor.isdecimal()):
        raise ValueError(f"the engine version must be two numbers such as 0.33, not {text!r}")
    return int(major), int(minor)


def _with_ranks(
    spec: GroupSpec, ranks: int, lockstep: bool | None, dialect: str | None
) -> GroupSpec:
    # Return the spec with data-parallel ranks. Raises ValueError for halves of split requests.
    if ranks > 1 and dialect is not None:
        raise ValueError(
            "--dp-ranks cannot be combined with --dialect: such engines serve only whole requests"
        )
    if ranks == 1 and lockstep is not None:
        raise ValueError(
            "--dp-lockstep and --no-dp-lockstep have no effect without --dp-ranks above 1"
        )
    return msgspec.structs.replace(spec, ranks=ranks, lockstep=lockstep)


def _publishing(
    spec: GroupSpec, groups: int, port: int | None, dialect: str | None, version: tuple[int, int]
) -> list[GroupSpec]:
    # Return one spec per group, each with two consecutive ports for KV events.
    #
    # With `port` None, the groups publish no events. Raises ValueError if the ports exceed 65535.
    if port is None:
        return [spec] * groups
    last = port + 2 * spec.ranks * groups - 1
    if port and last > 65535:
        raise ValueError(
            f"--kv-events-port {port}: {groups} groups need ports up to {last}, but 65535 is the "
            "last port"
        )
    form = "sglang" if dialect == "sglang" else "array" if version < (0, 24) else "map"
    firsts = [port + 2 * spec.ranks * index if port else 0 for index in range(groups)]
    return [
        msgspec.structs.replace(
            spec, kv_events=KvEventSpec(first, first + 1 if first else 0, form=form)
        )
        for first in firsts
    ]


def _halves(
    specs: list[GroupSpec], dialect: str | None, link: tuple[Any, ...], further: dict[str, Any]
) -> list[GroupSpec]:
    # Return one spec per group that prefills or decodes split requests, if there is a dialect.
    #
    # The groups' KV transfer agents and bootstrap servers get consecutive ports. Raises ValueError
    # for invalid options.
    if dialect is None:
        return specs
    transfer = TransferSpec(dialect, *link, **further).validate()
    return [
        msgspec.structs.replace(
            spec,
            transfer=msgspec.structs.replace(
                transfer,
                port=transfer.port + i if transfer.port else 0,
                bootstrap_port=transfer.bootstrap_port + i if transfer.bootstrap_port else 0,
            ),
        )
        for i, spec in enumerate(specs)
    ]


async def _serve(
    specs: list[GroupSpec],
    host: str,
    port: int,
    fault: str,
    seed: int,
    keep_alive_s: float,
    chaos_port: int | None,
    as_json: bool,
) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        members = await stack.enter_async_context(
            run_fleet(specs, host, port, fault, seed, keep_alive_s)
        )
        for member in members:
            write_line(_ready(member, as_json))
        if chaos_port is not None:
            opened = await stack.enter_async_context(run_chaos_server(members, chaos_port))
            write_line(f"set faults at 127.0.0.1:{opened}", err=True)
        await stop.wait()


def _ready(member: FleetGroup, as_json: bool) -> str:
    spec = member.group.spec
    if as_json:
        facts = {
            "model": spec.served_name,
            "gpu": spec.gpu.name,
            "tp": spec.tp,
            "layout": spec.layout.label,
            "role": spec.role,
        }
        half = member.pd_role.startup_members() if member.pd_role is not None else {}
        events = member.group.kv_events
        if events is not None:
            half = half | {"kv_events": events.port, "kv_replays": events.replay_port}
        return msgspec.json.encode(
            {"ready": member.url} | facts | {"kv_tokens": spec.capacity_tokens} | half
        ).decode()
    shape = f"{spec.model.name} on {spec.layout.gpus} x {spec.gpu.name}"
    size = f"{spec.capacity_tokens:,} tokens of KV"
    return f"ready {member.url} model={spec.served_name} ({shape}, {size})"


def main() -> None:
    """Run `penstock mock` with the process's arguments, for `python -m mockgpu`."""
    run_command(mock, sys.argv[1:], "python -m mockgpu", os.environ)

"""The command `penstock doctor`, which checks engines and a configuration before production.

Exit codes: 0 no check failed, 1 a check failed, 2 wrong usage.
"""

from __future__ import annotations

import http.client
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from shutil import get_terminal_size
from textwrap import wrap
from types import MappingProxyType
from typing import Annotated

import msgspec

from command_line import Option, UsageError, styled, write_line
from gateway.cli.doctor.drift_check import check_drift
from gateway.cli.doctor.engine_checks import check_engine
from gateway.cli.doctor.engine_probe import (
    ProbeResult,
    listed_models,
    measure_decode_s,
    probe_engine,
)
from gateway.cli.doctor.findings import (
    CheckFinding,
    CheckVerdict,
    fail_finding,
    group_findings,
    unknown_finding,
    warn_finding,
)
from gateway.cli.doctor.kv_event_checks import check_kv_events, description_path
from gateway.cli.doctor.production_checklist import CheckedEndpoint, CheckedFleet, run_checklist
from gateway.cli.doctor.redis_check import check_redis
from gateway.cli.doctor.seed_checklist import seed_findings
from gateway.cli.engine_detection import config_with_kinds
from gateway.cli.shared_options import EngineKeyOption, JsonOption, check_engine_key
from gateway.cli.terminal_output import print_json, print_line, sanitize
from gateway.config import (
    Config,
    ConfigError,
    EndpointSpec,
    LoadedConfig,
    config_from_engines,
    load_with_warnings,
)
from gateway.fleet.endpoint_from_config import to_endpoint
from gateway.fleet.served_models import engine_name, explicit_models
from gateway.http.outgoing_tls import ClientContexts
from kvtransfer.dialects import standalone_members
from policies.default_policy import DEFAULT_POLICY
from policies.engine_kinds import ENGINE_TRAITS

THREADS = 16
MEASURED_TOKENS = 32
PIPE_WIDTH = 120
MIN_WIDTH = 24
"""Number of columns for what a check has seen, however narrow the terminal is."""
_GAP = "  "
MARKS: Mapping[CheckVerdict, tuple[str, str]] = MappingProxyType(
    {
        CheckVerdict.PASS: ("ok", "green"),
        CheckVerdict.WARN: ("warn", "yellow"),
        CheckVerdict.FAIL: ("FAIL", "bold red"),
        CheckVerdict.UNKNOWN: ("?", "cyan"),
    }
)


def doctor(
    config: Annotated[
        Path | None, Option("--config", "-c", help="Configuration file to check.")
    ] = None,
    engine: Annotated[
        list[str] | None,
        Option("--engine", help="URL of an engine; repeat the option for more engines."),
    ] = None,
    engine_key: EngineKeyOption = None,
    measure: Annotated[
        bool,
        Option(
            "--measure", help="Also measure each engine's decode speed, at batch sizes 1 and 16."
        ),
    ] = False,
    quiet: Annotated[
        bool,
        Option("--quiet", help="Do not send a test request for one token to the engines."),
    ] = False,
    every: Annotated[
        bool,
        Option(
            "--all",
            help="Print one row per engine; by default, equal rows of many engines are merged.",
        ),
    ] = False,
    seeds: Annotated[
        bool,
        Option(
            "--seeds",
            help="Print only the checklist for production (items 86 to 97 of `penstock seeds`).",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check engines and a configuration before production, with a fix for every problem."""
    if (config is None) == (not engine):
        raise UsageError("give either --config FILE, or --engine URL (repeatable), but not both")
    check_engine_key(config, engine_key)
    loading = partial(_load, config, engine or [], engine_key)
    findings = list(_findings(config, loading, measure=measure and not quiet, token=not quiet))
    if seeds:
        findings = seed_findings(findings)
    failed = any(finding.verdict is CheckVerdict.FAIL for finding in findings)
    if as_json:
        print_json(
            {
                "ok": not failed,
                "findings": [msgspec.structs.asdict(finding) for finding in findings],
            }
        )
    else:
        _print_counts(findings)
        _print_table(findings if every else group_findings(findings))
    raise SystemExit(1 if failed else 0)


def _load(file: Path | None, urls: Sequence[str], engine_key: str | None) -> LoadedConfig:
    if file is not None:
        return load_with_warnings(file, os.environ)
    build = partial(config_from_engines, urls, DEFAULT_POLICY, "127.0.0.1", 0, 0, engine_key)
    return config_with_kinds(urls, build)[0]


def _findings(
    file: Path | None, load: Callable[[], LoadedConfig], *, measure: bool, token: bool
) -> Iterator[CheckFinding]:
    try:
        loaded = load()
    except ConfigError as error:
        for problem in error.problems:
            yield fail_finding(
                f"{problem.file}:{problem.line}:{problem.col}",
                "configuration",
                f"{problem.path} {problem.message}",
                "",
            )
        return
    for problem in loaded.warnings:
        yield warn_finding(
            f"{Path(problem.file).name}:{problem.line}",
            "configuration",
            f"{problem.path} {problem.message}",
            "",
        )
    yield from check_redis(loaded.config)
    if file is not None:
        yield from check_drift(loaded.config)
    yield from _engine_findings(loaded, with_file=file is not None, measure=measure, token=token)


def _discovery_findings(config: Config) -> Iterator[CheckFinding]:
    fix = "check them with --engine URL, or use penstock status with a running gateway"
    for pool, spec in config.pools.items():
        if spec.discover is not None:
            yield unknown_finding(
                f"pool {pool}",
                "discovery",
                "discovered endpoints are not checked, only those in the file",
                fix,
            )


def _probe_all(
    specs: Sequence[tuple[str, EndpointSpec]], health_path: str, *, token: bool
) -> list[CheckedEndpoint]:
    # Probe all endpoints, given as (pool, endpoint), in several threads.
    with ThreadPoolExecutor(THREADS) as threads:
        probes = threads.map(lambda spec: _probe(spec[1], health_path, token=token), specs)
        return [
            CheckedEndpoint(to_endpoint(pool, spec), result)
            for (pool, spec), result in zip(specs, probes, strict=True)
        ]


def _engine_findings(
    loaded: LoadedConfig, *, with_file: bool, measure: bool, token: bool
) -> Iterator[CheckFinding]:
    config = loaded.config
    yield from _discovery_findings(config)
    specs = [
        (pool, spec) for pool, pool_spec in config.pools.items() for spec in pool_spec.endpoints
    ]
    members = _probe_all(specs, config.health.path, token=token)
    served = [_served(config, member) for member in members]
    for member, own in zip(members, served, strict=True):
        pool = member.endpoint.pool
        named = [model for model in explicit_models(config) if model.pool == pool]
        models = {model.name: engine_name(model, member.endpoint) for model in named}
        split = any(model.split is not None for model in config.models if model.pool == pool)
        elsewhere = frozenset().union(*(names for names in served if names is not own))
        yield from check_engine(
            member.probe_result,
            member.endpoint,
            models,
            split=split,
            elsewhere=elsewhere & models.keys(),
        )
        events = next(spec.kv_events for _, spec in specs if spec.url == member.endpoint.url)
        yield from check_kv_events(member.probe_result, member.endpoint, events)
    reachable = [member for member in members if member.probe_result.problem is None]
    if reachable:
        pace = _measure_paces(config, reachable) if measure else {}
        file_config = config if with_file else None
        yield from run_checklist(
            CheckedFleet(reachable, file_config, pace, _collectives(reachable))
        )


def _collectives(members: Sequence[CheckedEndpoint]) -> dict[str, float]:
    # Return the computed share of a decode step that collectives take, by endpoint.
    #
    # Only TP groups of several known GPUs that serve a built-in model are included.
    from planner.seeds.collectives import collectives_share

    return {
        member.endpoint.name: collectives_share(
            member.model, member.gpu, member.endpoint.layout.tp, 1, member.context_tokens or 4096
        )
        for member in members
        if member.model is not None and member.gpu is not None and member.endpoint.layout.tp > 1
    }


def _served(config: Config, member: CheckedEndpoint) -> frozenset[str]:
    own, listed = member.endpoint, listed_models(member.probe_result)
    models = (model for model in explicit_models(config) if model.pool == own.pool)
    return frozenset(model.name for model in models if engine_name(model, own) in listed)


def _probe(spec: EndpointSpec, health_path: str, *, token: bool) -> ProbeResult:
    # Query one engine; for an endpoint of split requests, send a request of its role.
    role_members = {} if spec.role == "both" else standalone_members(spec.engine)
    more = role_members if token else None
    return probe_engine(
        spec.url,
        _key(spec),
        ENGINE_TRAITS[spec.engine].health_path or health_path,
        more=more,
        encryption=ClientContexts().encryption_for(spec),
        events_path=description_path(spec.engine, spec.kv_events),
    )


def _measure_paces(
    config: Config, members: Sequence[CheckedEndpoint]
) -> dict[str, tuple[float, float]]:
    # Return the seconds per token at batch 1 and 16 by endpoint, measured one endpoint at a time.
    #
    # Endpoints whose requests fail are left out.
    specs = {spec.url: spec for pool in config.pools.values() for spec in pool.endpoints}
    contexts = ClientContexts()
    paces = {}
    for member in members:
        url, model = member.endpoint.url, next(iter(listed_models(member.probe_result)), None)
        if model is None:
            continue
        arguments = (
            url,
            _key(specs[url]),
            model,
            MEASURED_TOKENS,
            contexts.encryption_for(specs[url]),
        )
        try:
            alone_s = measure_decode_s(*arguments)
            with ThreadPoolExecutor(16) as threads:
                concurrent_s = list(
                    threads.map(
                        lambda _, arguments=arguments: measure_decode_s(*arguments), range(16)
                    )
                )
        except (OSError, http.client.HTTPException):
            continue
        paces[member.endpoint.name] = (alone_s, sum(concurrent_s) / len(concurrent_s))
    return paces


def _key(spec: EndpointSpec) -> str | None:
    return None if spec.api_key is None else spec.api_key.reveal()


def _print_table(findings: Sequence[CheckFinding]) -> None:
    # Print a line per finding, and its fix below; long texts continue below their beginning.
    rows = [("", "what", "check")]
    rows += [(MARKS[each.verdict][0], each.subject, each.check) for each in findings]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    indent = " " * (sum(widths) + len(_GAP) * len(widths))
    columns = get_terminal_size((PIPE_WIDTH, 0)).columns if sys.stdout.isatty() else PIPE_WIDTH
    room = max(columns - len(indent), MIN_WIDTH)
    heads = _GAP.join(head.ljust(width) for head, width in zip(rows[0], widths, strict=True))
    write_line(styled(f"{heads}{_GAP}seen", "dim", sys.stdout))
    for finding, row in zip(findings, rows[1:], strict=True):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        styles = (MARKS[finding.verdict][1], "bold", "")
        marked = [
            styled(sanitize(cell), style, sys.stdout)
            for cell, style in zip(cells, styles, strict=True)
        ]
        seen = wrap(sanitize(finding.seen), room) or [""]
        write_line(_GAP.join([*marked, seen[0]]).rstrip())
        for line in seen[1:]:
            write_line(indent + line)
        for line in wrap(f"-> {finding.fix}", room) if finding.fix else ():
            write_line(styled(indent + line, "dim", sys.stdout))


def _print_counts(findings: Sequence[CheckFinding]) -> None:
    counts = {
        verdict: sum(finding.verdict is verdict for finding in findings) for verdict in CheckVerdict
    }
    summary = (
        f"{counts[CheckVerdict.PASS]} passed, {counts[CheckVerdict.WARN]} warnings, "
        f"{counts[CheckVerdict.FAIL]} failed, {counts[CheckVerdict.UNKNOWN]} unknown"
    )
    print_line(summary, style="red" if counts[CheckVerdict.FAIL] else "green")

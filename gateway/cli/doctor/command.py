"""The command `penstock doctor`. Exit codes: 0 nothing failed, 1 something did, 2 wrong usage."""

from __future__ import annotations

import http.client
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gateway.cli.doctor.checklist import Fleet, Member, points
from gateway.cli.doctor.engine import judge
from gateway.cli.doctor.findings import Finding, Verdict, bad, doubtful, group_findings, unknown
from gateway.cli.doctor.probe import Probed, decode_s, models_of, probe
from gateway.cli.doctor.redis_probe import judge_redis
from gateway.cli.output import Json, print_json, say, shown
from gateway.config import Config, ConfigError, EndpointSpec, Loaded, examine, from_engines
from gateway.fleet.endpoint_registry import described
from gateway.fleet.model_names import engine_name, explicit_models
from gateway.http.tls_clients import ClientContexts
from kvtransfer.dialects import by_itself

THREADS = 16
TOKENS_TIMED = 32
WIDTH_WITHOUT_A_TERMINAL = 120
MARKS: Mapping[Verdict, tuple[str, str]] = MappingProxyType(
    {
        Verdict.PASS: ("ok", "green"),
        Verdict.WARN: ("warn", "yellow"),
        Verdict.FAIL: ("FAIL", "bold red"),
        Verdict.UNKNOWN: ("?", "cyan"),
    }
)


def doctor(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="Configuration file to go through.")] = None,
    engine: Annotated[list[str] | None, typer.Option("--engine", help="URL of an engine; repeat for more.")] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Also time decoding, alone and 16 at once.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Ask no engine for a token.")] = False,
    every: Annotated[bool, typer.Option("--all", help="A row per engine, however many there are.")] = False,
    as_json: Json = False,
) -> None:
    """Examine engines and a configuration before traffic meets them: what works, what does not, and what to do."""
    if (config is None) == (not engine):
        raise typer.BadParameter("give either --config FILE or --engine URL, once per engine")
    findings = list(_findings(config, engine or [], measure=measure and not quiet, token=not quiet))
    failed = any(each.verdict is Verdict.FAIL for each in findings)
    if as_json:
        print_json({"ok": not failed, "findings": [msgspec.structs.asdict(each) for each in findings]})
    else:
        _show_counts(findings)
        _show(findings if every else group_findings(findings))
    raise typer.Exit(1 if failed else 0)


def _findings(file: Path | None, urls: Sequence[str], *, measure: bool, token: bool) -> Iterator[Finding]:
    try:
        loaded = (
            examine(file, os.environ) if file is not None else from_engines(urls, "prefix_aware", "127.0.0.1", 0, 0)
        )
    except ConfigError as error:
        for problem in error.problems:
            yield bad(
                f"{problem.file}:{problem.line}:{problem.col}", "configuration", f"{problem.path} {problem.message}", ""
            )
        return
    for problem in loaded.warnings:
        yield doubtful(
            f"{Path(problem.file).name}:{problem.line}", "configuration", f"{problem.path} {problem.message}", ""
        )
    yield from judge_redis(loaded.config)
    yield from _examined(loaded, with_file=file is not None, measure=measure, token=token)


def _examined(loaded: Loaded, *, with_file: bool, measure: bool, token: bool) -> Iterator[Finding]:
    config = loaded.config
    for pool in [name for name, found in config.pools.items() if found.discover is not None]:
        fix = "name them with --engine URL, or ask a gateway that runs: penstock status"
        yield unknown(f"pool {pool}", "discovery", "who is discovered is not examined, who stands in the file is", fix)
    specs = [(pool, spec) for pool, found in config.pools.items() for spec in found.endpoints]
    with ThreadPoolExecutor(THREADS) as threads:
        probes = threads.map(lambda each: _probe(each[1], config.health.path, token=token), specs)
        members = [Member(described(pool, spec), found) for (pool, spec), found in zip(specs, probes, strict=True)]
    served = [_served(config, member) for member in members]
    for member, own in zip(members, served, strict=True):
        pool = member.endpoint.pool
        named = [model for model in explicit_models(config) if model.pool == pool]
        models = {model.name: engine_name(model, member.endpoint) for model in named}
        split = any(model.split is not None for model in config.models if model.pool == pool)
        elsewhere = frozenset().union(*(names for names in served if names is not own)) & models.keys()
        yield from judge(member.found, member.endpoint, models, split=split, elsewhere=elsewhere)
    reached = [member for member in members if member.found.problem is None]
    if reached:
        pace = _paces(config, reached) if measure else {}
        yield from points(Fleet(reached, config if with_file else None, pace))


def _served(config: Config, member: Member) -> frozenset[str]:
    """Return the names of the configured models that the engine lists."""
    own, listed = member.endpoint, models_of(member.found)
    models = (model for model in explicit_models(config) if model.pool == own.pool)
    return frozenset(model.name for model in models if engine_name(model, own) in listed)


def _probe(spec: EndpointSpec, health_path: str, *, token: bool) -> Probed:
    """A half of split requests is asked as the half that it is."""
    half = {} if spec.role == "both" else by_itself(spec.engine)
    more = half if token else None
    return probe(spec.url, _key(spec), health_path, more=more, encryption=ClientContexts().of(spec))


def _paces(config: Config, members: Sequence[Member]) -> dict[str, tuple[float, float]]:
    """Seconds per token alone and among 16, by endpoint, one endpoint after the other. Who fails is left out."""
    specs = {spec.url: spec for pool in config.pools.values() for spec in pool.endpoints}
    contexts = ClientContexts()
    paces = {}
    for member in members:
        url, model = member.endpoint.url, next(iter(models_of(member.found)), None)
        if model is None:
            continue
        asked = (url, _key(specs[url]), model, TOKENS_TIMED, contexts.of(specs[url]))
        try:
            alone = decode_s(*asked)
            with ThreadPoolExecutor(16) as threads:
                many = list(threads.map(lambda _, asked=asked: decode_s(*asked), range(16)))
        except (OSError, http.client.HTTPException):
            continue
        paces[member.endpoint.name] = (alone, sum(many) / len(many))
    return paces


def _key(spec: EndpointSpec) -> str | None:
    return None if spec.api_key is None else spec.api_key.reveal()


def _show(findings: Sequence[Finding]) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "what", "check", "seen"):
        table.add_column(name, overflow="fold")
    for each in findings:
        mark, style = MARKS[each.verdict]
        seen = Text(shown(each.seen))
        if each.fix:
            seen.append(f"\n-> {each.fix}", "dim")
        table.add_row(Text(mark, style), Text(each.subject, "bold"), Text(each.check), seen)
    Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH_WITHOUT_A_TERMINAL).print(table)


def _show_counts(findings: Sequence[Finding]) -> None:
    counts = {verdict: sum(each.verdict is verdict for each in findings) for verdict in Verdict}
    told = f"{counts[Verdict.PASS]} fine, {counts[Verdict.WARN]} doubtful, {counts[Verdict.FAIL]} failed"
    style = "red" if counts[Verdict.FAIL] else "green"
    say(f"{told}, {counts[Verdict.UNKNOWN]} not to be seen from here", style=style)

"""Tests that the documentation names only files, commands, options, metrics and keys that exist.

This covers README.md and docs/. tests/architecture/test_prose.py checks the prose.
"""

from __future__ import annotations

import ast
import fnmatch
import importlib
import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ruamel.yaml import YAML

from command_line import parameters_of, parse_command
from gateway.cli import commands
from gateway.cli.commands import command_function
from gateway.config import json_schema, load_text
from gateway.metrics.catalogue import Metrics
from gateway.metrics.exposition import render_page
from gateway.workers.supervisor_metrics import SupervisorMetrics
from kvtransfer.store.__main__ import parser
from policies import admission_registry, policy_registry
from policies.routing_algorithm import pick
from tests.certificate_authority import Authority
from tests.unit.policies.builders import ask, candidate
from tools.docgen import generated_files as made

ROOT = Path(__file__).parents[3]
PATHS = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in PATHS}
WRITTEN = {name: PAGES[name] for name in PAGES.keys() - made()}
"""Handwritten pages. tests/unit/tools/test_docgen.py compares the others with the code."""
ROOMS = (
    "command_line",
    "docs",
    "gateway",
    "policies",
    "kvtransfer",
    "mockgpu",
    "planner",
    "deploy",
    "tests",
    "tools",
    "bench",
)
# Options in documents that belong to other programs, not to `penstock`.
NOT_COMMANDS = {
    "--all",  # of --all2all-backend
    "--compilation-config",
    "--enable-eplb",
    "--enable-prompt-tokens-details",
    "--eplb-config",
    "--moe-a",  # of --moe-a2a-backend
    "--load-format",
    "--enable-feature",
    "--ahead",
    "--clock",  # of make planned
    "--functions",
    "--stream-interval",
}
"""Options in running text that belong to an engine, to Prometheus, or to a benchmark."""
SUFFIXES = ("py", "md", "txt", "yaml", "log", "crt")

each_page = pytest.mark.parametrize("name", PAGES)
each_written_page = pytest.mark.parametrize("name", sorted(WRITTEN))


def blocks(text: str, *languages: str) -> list[str]:
    matches = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.M | re.S)
    return [body for language, body in matches if language in languages]


def inline(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def tracked_files() -> set[str]:
    # Return the files and folders of a fresh checkout, without build outputs.
    #
    # Without git they cannot be distinguished, so all files count.
    command_line = (
        "git",
        "-c",
        "safe.directory=*",
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
    )
    listed = subprocess.run(command_line, cwd=ROOT, capture_output=True, text=True, check=False)
    names = listed.stdout.splitlines() or map(
        str, (path.relative_to(ROOT) for path in ROOT.rglob("*"))
    )
    files = [Path(name) for name in names]
    return {str(path) for file in files for path in (file, *file.parents)}


@each_page
def test_every_link_leads_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[name]):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        page = (ROOT / name).parent / path if path else ROOT / name
        assert page.exists(), target
        if anchor:
            assert anchor in anchors(page.read_text()), target


@each_page
def test_every_file_it_names_exists(name: str) -> None:
    named = set(re.findall(rf"(?<![\w/.-])(?:{'|'.join(ROOMS)})/[\w./*-]*[\w*/]", PAGES[name]))
    named -= {"deploy/penstock"}  # kubectl's deploy/NAME
    assert (
        sorted(path for path in named if not fnmatch.filter(tracked_files(), path.rstrip("/")))
        == []
    )


@cache
def file_names() -> frozenset[str]:
    return frozenset(path.name for room in ROOMS for path in (ROOT / room).rglob("*.*"))


@each_written_page
def test_every_module_it_names_without_a_folder_exists(name: str) -> None:
    named = {word for word in inline(PAGES[name]) if re.fullmatch(r"\w+\.(py|sh|md)", word)}
    assert sorted(named - file_names()) == []


def test_the_architecture_page_names_every_gateway_module_or_its_folder() -> None:
    page = PAGES["docs/architecture.md"]
    below = [
        path.relative_to(ROOT / "gateway") for path in sorted((ROOT / "gateway").rglob("[!_]*.py"))
    ]
    mentioned = set(re.findall(r"\b\w+\.py\b", page))
    # A folder followed by a colon is followed by its files.
    folders = set(re.findall(r"`(\w+)/`(?!:)", page))
    assert [
        str(path) for path in below if path.name not in mentioned and path.parts[0] not in folders
    ] == []


@cache
def sources() -> Mapping[str, str]:
    result: dict[str, str] = {}
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        text = path.read_text()
        for name in (path.stem, *re.findall(r"^class (\w+)", text, re.M)):
            result[name] = result.get(name, "") + text
    return result


def is_code(word: str) -> bool:
    holder, _, name = word.partition(".")
    pattern = rf"\b(?:def|class) {re.escape(name)}\b|^ +(?:self\.)?{re.escape(name)}\b.*[:=]"
    return re.search(pattern, sources().get(holder, ""), re.M) is not None


@each_written_page
def test_every_attribute_it_names_exists(name: str) -> None:
    named = {
        match[0] for word in inline(PAGES[name]) if (match := re.match(r"[A-Z]\w+\.\w+", word))
    }
    assert sorted(word for word in named if not is_code(word)) == []

    # Commands


def commands_of(text: str) -> Iterator[str]:
    for word in inline(text):
        if re.match(r"penstock [a-z]+( |$)", word):
            yield re.sub(r"\[([A-Z]+)\]", r"\1", word)
    for block in blocks(text, "", "sh", "console"):
        for line in block.replace("\\\n", " ").splitlines():
            if match := re.match(
                r"(?:\$ |    |.* -- )?(?:\.venv/bin/)?(penstock [a-z]+(?: [ -~]*)?)$", line
            ):
                yield re.split(r"\s\d?[#>|&;]", match[1])[0].strip()


COMMANDS = sorted({(name, line) for name, text in WRITTEN.items() for line in commands_of(text)})


@pytest.mark.parametrize(("name", "line"), COMMANDS)
def test_every_command_it_shows_accepts_its_options(name: str, line: str) -> None:
    called, *arguments = shlex.split(line)[1:]
    command = command_function(called)
    there = str(ROOT / "README.md")
    values = [
        there if re.fullmatch(r"FILE|TRACE|[\w./-]+\.(yaml|jsonl|gz)", argument) else argument
        for argument in arguments
    ]
    if not values:  # the text mentions the command without arguments
        return
    words = ["3" if argument == "N" else argument for argument in values]
    parse_command(command, words, called, {})


@cache
def options() -> frozenset[str]:
    parameters = [
        each for name in commands.COMMANDS for each in parameters_of(command_function(name))
    ]
    named = {option for each in parameters for option in (*each.on, *each.off)} | {"--help"}
    of_the_store = {option for action in parser()._actions for option in action.option_strings}
    return frozenset(named | of_the_store)


@each_written_page
def test_every_option_it_names_belongs_to_a_command(name: str) -> None:
    named = {match[0] for word in inline(PAGES[name]) if (match := re.match(r"--[a-z-]+", word))}
    assert sorted(named - options() - NOT_COMMANDS) == []


@each_written_page
def test_every_make_target_it_names_exists(name: str) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M))
    shown = "\n".join(blocks(PAGES[name], "", "sh"))
    named = {
        match[1] for word in inline(PAGES[name]) if (match := re.match(r"make ([a-z0-9-]+)", word))
    }
    named |= set(re.findall(r"^(?:    )?make ([a-z0-9-]+)", shown, re.M))
    assert sorted(named - targets) == []

    # Metrics and configuration


@cache
def series() -> frozenset[str]:
    return frozenset(
        re.findall(
            r"penstock_\w+",
            (
                Metrics().render() + render_page(SupervisorMetrics().collect({}), exemplars=False)
            ).decode(),
        )
    )


@each_written_page
def test_every_metric_it_names_exists(name: str) -> None:
    # penstock_kv is a package.
    named = set(re.findall(r"`(penstock_(?!kv\b)[a-z_]+)", PAGES[name]))
    families = {name for name in named if name.endswith("_")}
    assert sorted(named - families - series()) == []
    assert (
        sorted(
            name
            for name in families
            if not any(series_name.startswith(name) for series_name in series())
        )
        == []
    )


@cache
def key_paths() -> frozenset[tuple[str, ...]]:
    schema = json_schema()

    def below(node: Mapping[str, Any], way: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        if "$ref" in node:
            yield from below(schema["$defs"][node["$ref"].rsplit("/", 1)[-1]], way)
        for inner in (
            *node.get("anyOf", ()),
            *filter(None, [node.get("items")]),
            node.get("additionalProperties"),
        ):
            if isinstance(inner, dict):
                yield from below(inner, way)
        for inner in node.get("patternProperties", {}).values():
            yield from below(inner, way)
        for key, inner in node.get("properties", {}).items():
            yield (*way, key)
            yield from below(inner, (*way, key))

    return frozenset(below(schema, ()))


@each_written_page
def test_every_configuration_key_it_names_exists(name: str) -> None:
    ends = {way[index:] for way in key_paths() for index in range(len(way))}
    sections = {way[-2] for way in key_paths() if len(way) > 1}
    dotted = [
        word
        for word in inline(PAGES[name])
        if re.fullmatch(r"[a-z_]+(\[\])?(\.[a-z_*-]+(\[\])?)+", word)
    ]
    ways = {
        word: [part.removesuffix("[]") for part in word.split(".") if "*" not in part]
        for word in dotted
    }
    named = {
        word: tuple(way)
        for word, way in ways.items()
        if way[0] in sections and way[-1] not in SUFFIXES
    }
    named = {word: way for word, way in named.items() if not is_code(word)}
    without_name = {
        word: way[:1] + way[2:] if len(way) > 2 else way for word, way in named.items()
    }  # pools.chat.policy
    assert [word for word, way in named.items() if ends.isdisjoint({way, without_name[word]})] == []


def completed(part: dict[str, Any]) -> dict[str, Any]:
    pools = part.setdefault("pools", {})
    for model in part.get("models", ()):
        pools.setdefault(model.setdefault("pool", "main"), {})
    if not pools:
        pools["main"] = {}
    for pool in pools.values():
        if not pool.get("endpoints") and "discover" not in pool:
            pool["endpoints"] = [{"url": "http://127.0.0.1:9000"}, {"url": "http://127.0.0.1:9001"}]
    return {"version": 1, **part}


SECRETS = r"\$\{(?:file:[^}]*|[A-Z_]+)\}"
SNIPPETS = [
    (name, block)
    for name, text in sorted(WRITTEN.items())
    for block in blocks(text, "yaml")
    if not json_schema()["properties"].keys().isdisjoint(YAML(typ="safe").load(block))
]


@pytest.mark.parametrize(("name", "block"), SNIPPETS)
def test_every_configuration_it_shows_passes_the_check(
    name: str, block: str, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("long-enough-for-everybody")
    if "  s3:" in block:
        pytest.importorskip("botocore", reason="the extra `s3` is not installed")
    if "tls/server.pem" in block:
        Authority(tmp_path / "tls").issue("server", "localhost")
    part = YAML(typ="safe").load(re.sub(rf"'?{SECRETS}'?", "'${file:secret}'", block))
    with (tmp_path / "gateway.yaml").open("w") as file:
        YAML(typ="safe").dump(completed(part), file)
    loaded = load_text(
        (tmp_path / "gateway.yaml").read_bytes(), str(tmp_path / "gateway.yaml"), os.environ
    )
    assert loaded.warnings == ()


PYTHON = [
    (name, block) for name, text in sorted(WRITTEN.items()) for block in blocks(text, "python")
]


@pytest.mark.parametrize(("name", "block"), PYTHON)
def test_its_python_code_parses_and_its_imports_exist(name: str, block: str) -> None:
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ROOMS:
            module = importlib.import_module(node.module)
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


def test_the_example_of_a_policy_fills_one_endpoint_up_to_its_share_and_then_the_next() -> None:
    (example,) = blocks(PAGES["docs/policies.md"], "python")
    names: dict[str, Any] = {}
    exec(example, names)
    policy = names["Fullest"]().build()
    fuller, emptier = candidate(0, cap=10, in_flight=7), candidate(1, cap=10, in_flight=1)
    picked = pick(policy, ask(), [fuller, emptier])
    assert picked is not None
    assert picked.candidate is fuller
    fuller.load.in_flight = 8
    picked = pick(policy, ask(), [fuller, emptier])
    assert picked is not None
    assert picked.candidate is emptier

    # Parameters


DEFAULTS = {
    match[1]: match[2]
    for match in re.finditer(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", PAGES["docs/policies.md"], re.M)
    if match[1] in {*policy_registry.names(), *admission_registry.names()} and "`" in match[2]
}
"""A regular expression for the cells at the end of a row in tables of rules: parameters with their
defaults.
"""


@pytest.mark.parametrize("rule", sorted(DEFAULTS))
def test_a_table_has_the_defaults_of_a_policy(rule: str) -> None:
    kinds = [
        source.params_type(rule)
        for source in (policy_registry, admission_registry)
        if rule in source.names()
    ]
    defaults = {
        name: value for kind in kinds for name, value in msgspec.structs.asdict(kind()).items()
    }
    documented = dict(re.findall(r"`(\w+)` ([\d.]+)", DEFAULTS[rule]))
    assert documented.keys() <= defaults.keys()
    assert {name: float(value) for name, value in documented.items()} == {
        name: defaults[name] for name in documented
    }


@pytest.mark.parametrize(
    ("page", "section", "rule"),
    [
        ("docs/policies.md", r"\*\*`least_loaded`\*\*.*?(?=\*\*`)", "least_loaded"),
        ("docs/policies.md", r"\*\*`prefix_aware`\*\*.*?(?=One set)", "prefix_aware"),
        ("docs/how-the-price-works.md", r"## The knobs.*", "priced"),
    ],
)
def test_a_table_of_parameters_has_all_of_them_and_their_defaults(
    page: str, section: str, rule: str
) -> None:
    part = re.search(section, PAGES[page], re.S)
    assert part
    documented = {
        name: float(value)
        for name, value in re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", part[0], re.M)
    }
    assert documented == msgspec.structs.asdict(policy_registry.params_type(rule)())

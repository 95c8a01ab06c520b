"""Generates reference pages, the JSON Schema, dashboards and alert rules from the code.

`make docs` runs this module. A test fails if the files in the repository differ from its output.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from command_line import Parameter, parameters_of
from gateway.cli.commands import COMMANDS, command_function
from gateway.config import json_schema
from gateway.config.root_section import Config
from gateway.disagg.state_machine import LIVE_STATES, TABLE
from gateway.metrics.catalogue import Metrics
from gateway.metrics.labels import Row
from gateway.metrics.metric_types import FamilySpec
from gateway.workers.supervisor_metrics import SupervisorMetrics
from planner.seeds.cli import counts_text
from planner.seeds.statements import TITLES, golden_text, seed_items
from policies import admission_registry, policy_registry
from tools.kv_layouts import CONNECTOR_REFUSALS, TP_PAIRS, layouts_page_rows
from tools.module_index import packages
from tools.monitoring.files import files

_GENERATED_NOTE = "<!-- Written by `make docs` from the code; do not edit. -->\n"


def generated_files() -> Mapping[str, str]:
    """Return the text of every generated file, by its path relative to the project's root
    folder.
    """
    return {
        "docs/reference/config.md": config_page(),
        "docs/reference/metrics.md": metrics_page(),
        "docs/reference/cli.md": cli_page(),
        "docs/reference/split-states.md": states_page(),
        "docs/reference/kv-layouts.md": layouts_page(),
        "docs/reference/modules.md": modules_page(),
        "docs/seeds.md": seeds_page(),
        "deploy/config/gateway.schema.json": json.dumps(json_schema(), indent=1) + "\n",
        **files(),
    }


def config_page() -> str:
    """Return the reference page for the configuration file, as Markdown.

    It lists the keys of each section with their types, defaults and meanings.
    """
    schema = json_schema()
    parts = [
        _GENERATED_NOTE,
        _CONFIG_INTRO,
        _section("The file", Config.__doc__ or "", schema, schema),
    ]
    for path, name in _sections("", schema, schema):
        definition = schema["$defs"][name]
        parts.append(_section(f"`{path}`", definition.get("description", ""), definition, schema))
    return "\n".join([*parts, _policies(), _admissions()])


def metrics_page() -> str:
    """Return the reference page for all metrics with their labels and buckets, as Markdown."""
    catalogue = (*Metrics().catalogue(), *SupervisorMetrics().catalogue())
    table = "\n".join(_row(row, [spec for spec in catalogue if spec.row == row]) for row in Row)
    caps = {label.name: label.max_values for spec in catalogue for label in spec.labels}
    buckets = "\n".join(
        f"- `{spec.name}`: {', '.join(f'{bound:g}' for bound in spec.buckets)}"
        for spec in catalogue
        if spec.buckets
    )
    shown_caps = _table(
        ("label", "maximum number of values"),
        [(f"`{name}`", str(cap)) for name, cap in sorted(caps.items())],
    )
    return "\n".join(
        [
            _GENERATED_NOTE,
            _METRICS_INTRO,
            table,
            "## Labels\n",
            _LABELS_INTRO,
            shown_caps,
            "## Buckets\n",
            buckets,
            "",
        ]
    )


def _row(row: Row, specs: Sequence[FamilySpec]) -> str:
    rows = [
        (
            f"`{spec.name}`",
            f"{spec.kind}, {spec.unit}".rstrip(", ")
            + (", exemplars" if spec.has_exemplars else ""),
            ", ".join(f"`{name}`" for name in spec.exposed_labels),
            spec.help,
            spec.merge,
            f"`{spec.owner}`",
        )
        for spec in specs
    ]
    return f"## {row}\n\n" + _table(
        ("metric", "type, unit", "labels", "meaning", "workers", "owner"), rows
    )


def cli_page() -> str:
    """Return the reference page for all commands with their arguments and options, as Markdown."""
    parts = [_GENERATED_NOTE, _CLI_INTRO]
    for name in COMMANDS:
        command = command_function(name)
        text = inspect.getdoc(command) or ""
        parts += [f"## penstock {name}\n", text.strip() + "\n", _options(parameters_of(command))]
    return "\n".join(parts)


def states_page() -> str:
    """Return the page about the states of a split request, with one table per state, as Markdown.

    A split request runs its prefill on one engine and its decode on another one.
    """
    parts = [_GENERATED_NOTE, _STATES_INTRO]
    for state, (owner, deadline) in LIVE_STATES.items():
        rows = [
            (
                f"`{event.name.lower()}`",
                event.value,
                row.state.replace("_", " "),
                "; ".join(act.value for act in row.acts) or "nothing",
            )
            for (source_state, event), row in TABLE.items()
            if source_state is state
        ]
        parts.append(f"## {state.replace('_', ' ')}\n\nOwner: {owner}. Deadline: {deadline}.\n")
        parts.append(_table(("event", "what happened", "next state", "actions"), rows))
    return "\n".join(parts)


def seeds_page() -> str:
    """Return the page about the five texts on inference parallelism that the project follows.

    For each item of a text, it lists the command that computes the item and the expected result.
    """
    items = seed_items()
    parts = [_GENERATED_NOTE, _SEEDS_INTRO, counts_text(items) + ".\n"]
    for seed, title in TITLES.items():
        rows = [
            (
                f"`{item.number}`",
                item.item + (f" ({item.note})" if item.note else ""),
                f"`{item.command}`" if item.command else "",
                golden_text(item),
            )
            for item in items
            if item.seed == seed
        ]
        parts.append(f"## Seed {seed}: {title}\n")
        parts.append(_table(("item", "statement", "command", "golden outcome"), rows))
    return "\n".join(parts)


def layouts_page() -> str:
    """Return the page that lists which KV cache layouts can be transferred, as Markdown.

    It also lists the layouts for which a transfer is refused, with the reason.
    """
    moving, refused = layouts_page_rows()
    pairs = [f"{source} → {sink}" for source, sink in TP_PAIRS]
    stopped = [(refusal.cache, refusal.reason) for refusal in CONNECTOR_REFUSALS]
    return "\n".join(
        [
            _GENERATED_NOTE,
            _LAYOUTS_INTRO,
            _table(("cache", "memory: source → sink", "types", *pairs), moving),
            "## Refused before a byte moves\n",
            _table(("cache", "memory: source → sink", "type", "reason"), refused),
            "## Refused when vLLM starts\n",
            _LAYOUTS_CONNECTOR,
            _table(("cache", "reason"), stopped),
        ]
    )


def modules_page() -> str:
    """Return the page that lists all modules, each with the first paragraph of its docstring."""
    parts = [_GENERATED_NOTE, _MODULES_INTRO]
    for path, contents, modules in packages():
        rows = [(f"`{name}`", text.replace("<", "&lt;")) for name, text in modules]
        parts += [f"## {path}\n", *([f"{contents}\n"] if contents else ())]
        parts.append(_table(("module", "what it does"), rows))
    return "\n".join(parts)


def main() -> None:
    """Write all generated pages, schemas, dashboards and rules below the working directory.

    It must be the project's root folder.
    """
    for path, text in generated_files().items():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)


def _sections(
    path: str, definition: Mapping[str, Any], schema: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    for key, field in definition.get("properties", {}).items():
        name, suffix = _target(field)
        if name and "properties" in schema["$defs"][name]:
            section_path = f"{path}.{key}{suffix}".lstrip(".")
            yield section_path, name
            yield from _sections(section_path, schema["$defs"][name], schema)


def _target(field: Mapping[str, Any]) -> tuple[str | None, str]:
    # Return the schema definition that a field refers to (or None), and its path suffix.
    #
    # The suffix is [] for a list and .NAME for a mapping.
    if "$ref" in field:
        return str(field["$ref"]).rsplit("/", 1)[-1], ""
    for choice in field.get("anyOf", ()):
        if "$ref" in choice:
            return _target(choice)
    if "items" in field:
        return _target(field["items"])[0], "[]"
    for inner in _values_of(field):
        return _target(inner)[0], ".NAME"
    return None, ""


def _values_of(field: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    inner = [*field.get("patternProperties", {}).values()]
    extra = field.get("additionalProperties")
    return [*inner, extra] if isinstance(extra, dict) else inner


def _section(
    title: str, text: str, definition: Mapping[str, Any], schema: Mapping[str, Any]
) -> str:
    required = definition.get("required", ())
    rows = [
        (
            f"`{key}`",
            _type(field, schema),
            _default(field, key in required),
            _meaning(field, schema),
        )
        for key, field in definition["properties"].items()
    ]
    return f"## {title}\n\n{text.strip()}\n\n" + _table(("key", "type", "default", "meaning"), rows)


def _meaning(field: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    name, _ = _target(field)
    return str(
        field.get("description") or (schema["$defs"][name].get("description", "") if name else "")
    )


def _type(field: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    if "$ref" in field:
        target = schema["$defs"][str(field["$ref"]).rsplit("/", 1)[-1]]
        return (
            " or ".join(f"`{value}`" for value in target["enum"]) if "enum" in target else "section"
        )
    if "anyOf" in field:
        return " or ".join(
            _type(choice, schema) for choice in field["anyOf"] if choice.get("type") != "null"
        )
    if "items" in field:
        return f"list of {_type(field['items'], schema)}s"
    if inner := _values_of(field):
        return f"mapping of name to {_type(inner[0], schema)}"
    if "const" in field:
        return f"`{field['const']}`"
    if field.get("format") == "password":
        return "secret"
    if field.get("pattern") in _UNITS:
        return _UNITS[field["pattern"]]
    return _plain_type(field)


def _plain_type(field: Mapping[str, Any]) -> str:
    type_names = {
        "integer": "whole number",
        "number": "number",
        "string": "text",
        "object": "mapping",
        "boolean": "true or false",
    }
    type_name = type_names[field["type"]]
    low, high = field.get("minimum"), field.get("maximum")
    return (
        f"{type_name}, {low:g} to {high:g}"
        if low is not None and high is not None and high <= 65536
        else type_name
    )


_UNITS: Mapping[str, str] = {
    str(schema["pattern"]): word
    for schema, word in (
        (json_schema()["$defs"]["Timeouts"]["properties"]["connect"], "duration"),
        (json_schema()["$defs"]["Limits"]["properties"]["body"], "size"),
    )
}


def _default(field: Mapping[str, Any], required: bool) -> str:
    if required:
        return "required"
    default = field.get("default")
    if default is None or default in ({}, [], ()):
        return ""
    return f"`{default}`"


def _policies() -> str:
    table = _by_name(policy_registry.names(), policy_registry.params_type)
    return "## Policies\n\n" + _table(("policy", "how it picks an endpoint", "parameters"), table)


def _admissions() -> str:
    table = _by_name(admission_registry.names(), admission_registry.params_type)
    return "## Admissions\n\n" + _table(
        ("admission", "which requests it admits", "parameters"), table
    )


def _by_name(
    names: Sequence[str], params_type: Callable[[str], type[msgspec.Struct]]
) -> list[tuple[str, str, str]]:
    rows = []
    for name in names:
        kind = params_type(name)
        fields = ", ".join(f"`{field}`" for field in kind.__struct_fields__) or "none"
        first = " ".join((kind.__doc__ or "").strip().split("\n\n")[0].split())
        rows.append((f"`{name}`", first, fields))
    return rows


def _options(parameters: Sequence[Parameter]) -> str:
    rows = []
    for parameter in parameters:
        names = ", ".join(f"`{name}`" for name in (*parameter.on, *parameter.off))
        name = names if parameter.is_option else f"`{parameter.name.upper()}`"
        has_no_default = (
            parameter.default is None or parameter.default is False or parameter.default == ""
        )
        default = "" if has_no_default else f"`{parameter.default}`"
        meaning = parameter.traits.help
        if parameter.envvar:
            meaning += f" Environment: `{parameter.envvar}`."
        rows.append((name, "required" if parameter.is_required else default, meaning))
    return _table(("argument or option", "default", "meaning"), rows) if rows else "No options.\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return (
        "\n".join(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
        )
        + "\n"
    )


_LAYOUTS_INTRO = """# KV layouts

Which caches move between engines with which numbers of tensor-parallel ranks. Every cell is a test
for every type of its row.

| | proof |
|---|---|
| `E` | two running vLLM engines: each head's bytes, and the answers, are equal (`make real`) |
| `V` | memory and tensors that vLLM 0.32's own specs and groups made; no engine (`make real`) |
| `M` | memory that the test's own numpy model made (`make test`) |

`E` is for `float32`. In each other test two processes, with an agent per rank, move a request of 75
tokens over TCP. Every head of every rank is then compared with the source's bytes. With `V` they
are written and read as vLLM's attention backend does it. With `M` all other memory is compared with
what it was before. The rest of the last block moves along.

The contents (`tokens`, `planes`, `heads`, `pages`) and orders of memory are explained in
[memory orders](../kvtransfer.md#memory-orders). Types have vLLM's names. `fp8` has a scale per
tensor, which belongs to the weights and does not move. The scales of `*_per_token_head` lie behind
each row and move with it.

**Several cache groups** share one memory, and each block belongs to one group. So a request has an
offer per group, with the group's own blocks; a sliding window's offer has the blocks of its window
only. Agents move them; [PenstockConnector](../vllm-connector.md) takes one group so far.
"""

_LAYOUTS_CONNECTOR = """Besides these, the connector refuses several cache groups, pipeline and
decode context parallelism, padded pages, packed heads, and keys and values of different sizes
([what is moved](../vllm-connector.md#what-is-moved-and-what-is-refused)).
"""

_CONFIG_INTRO = """\
# Configuration

One YAML 1.2 file. `penstock check FILE` prints every problem with its line and column.
`penstock schema` prints the JSON Schema for editors (`# yaml-language-server: $schema=...` as the
first line). Sample files: `deploy/config/`.

- Durations need a unit: `250ms`, `2s`, `1m30s` (us, ms, s, m, h, d). A bare number is an error.
- Sizes need a unit: `32MiB`, `1KB` (B; KB, MB, GB by 1000; KiB, MiB, GiB by 1024).
- `${NAME}` is an environment variable, `${NAME:-default}` one with a default. `${file:/path}` is
  the text of a file without its last newline, for secrets only; a relative path starts at the
  configuration's folder. `$${` is a literal `${`.
- Secrets are never printed: not in logs, not in `/config`, not in errors.
- Unknown keys and duplicate keys are errors.
"""

_MODULES_INTRO = """# Modules

Every module in one line, by package. Search this page for the words of a feature to find the module
that a change belongs to. [Architecture](../architecture.md) says which package owns what.
"""

_SEEDS_INTRO = """\
# The seeds, item by item

Penstock follows five texts on inference parallelism, its seeds. They contain 119 systems, rules,
tables, worked examples, checklist items and figures. `penstock seeds` prints this list. Each
answered item names a command and its golden outcome. A test runs the command, or the function
behind it, and compares; numbers agree within 1 %. Dotted names are members of what the command
prints with `--json`. A note says where the outcome differs from the seed, or what is missing.
[Sizing](sizing.md) shows how the gates of `penstock size` use the items.
"""

_METRICS_INTRO = """\
# Metrics

`GET /metrics` on the admin port returns them in Prometheus' text format. Units are base units;
counters end in `_total`. The standard `process_*` metrics are included (CPU seconds, resident and
virtual memory, file descriptors and their limit, start time). With `workers`, these are sums over
the workers and their supervisor, and the start time is the supervisor's.

A scraper that accepts `application/openmetrics-text` receives that format, with exemplars. Every
bucket of a family with exemplars names the newest request that fell into it, and its trace.

Series of an endpoint or a model also have the label `pool`, looked up in the configuration at the
scrape. Each table is a row of the dashboards in `deploy/grafana/` (docs/observability.md). The
column "workers" is how the series of several processes are merged, "owner" the module in
`gateway/` that updates the metric. Metrics of `workers/supervisor.py` exist only with `workers`.
"""

_LABELS_INTRO = """\
A label that has reached its maximum number of values is `other` for all further ones, which bounds
the size of a scrape.
"""

_STATES_INTRO = """# States of a split request

P is the prefill endpoint, D the decode endpoint (docs/life-of-a-split-request.md). The tables are
those of `gateway/disagg/state_machine.py`. The end states are `done`, `failed` and `gone`. After
`failed`, another attempt starts if the client has received no byte yet and the retry budget allows
it.
"""

_CLI_INTRO = """\
# Command line

`penstock COMMAND --help` prints the same information. Exit codes: 0 success, 1 failure, 2 wrong
usage, 130 stopped by Ctrl-C; `plan --fail-if-worse` also uses 3. Set `NO_COLOR` for output without
colours.
"""


if __name__ == "__main__":
    main()

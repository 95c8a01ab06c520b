"""Tests of valid configuration files: defaults, units, references, secrets, JSON schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel, ValidationError

from gateway.config import (
    Config,
    ConfigError,
    Secret,
    config_from_engines,
    json_schema,
    load_config,
    load_with_warnings,
    secret_rules,
)
from gateway.config.policy_sections import with_policy_of_roles
from policies.admission_registry import build_admission
from policies.prefix.prefix_index import PrefixIndex
from policies.routing_types import EngineKind, Role

ROOT = Path(__file__).parents[4]
SHORTEST = "version: 1\npools:\n  chat:\n    endpoints:\n      - url: http://127.0.0.1:9000\n"


def config(folder: Path, text: str, env: dict[str, str] | None = None) -> Config:
    file = folder / "gateway.yaml"
    file.write_text(text)
    return load_config(file, env or {})


@pytest.mark.parametrize(
    ("member", "policy"),
    [("role: decode", "prefix_aware"), ("role: both", "priced"), ("name: a", "priced")],
)
def test_a_pool_that_names_no_policy_has_one_by_the_roles_of_its_endpoints(
    tmp_path: Path, member: str, policy: str
) -> None:
    assert config(tmp_path, f"{SHORTEST}        {member}\n").pools["chat"].policy.name == policy


def test_a_named_policy_stays_whatever_the_roles_are() -> None:
    pool = {"policy": "priced", "endpoints": [{"role": "prefill"}]}
    assert with_policy_of_roles(pool) == pool
    assert with_policy_of_roles({**pool, "policy": None})["policy"] == "prefix_aware"
    assert with_policy_of_roles({"endpoints": [{"role": ["prefill"]}, 3]}) == {
        "endpoints": [{"role": ["prefill"]}, 3]
    }


def test_the_shortest_file_gets_every_default(tmp_path: Path) -> None:
    shortest = config(tmp_path, SHORTEST)
    pool = shortest.pools["chat"]
    assert (shortest.listeners.api.host, shortest.listeners.api.port) == ("127.0.0.1", 8080)
    assert (shortest.listeners.admin.host, shortest.listeners.admin.port) == ("127.0.0.1", 8081)
    assert pool.policy.name == "priced"
    assert (pool.waiting_room.size, pool.waiting_room.timeout) == (256, 30.0)
    (endpoint,) = pool.endpoints
    assert (endpoint.role, endpoint.engine, endpoint.max_concurrency) == (
        Role.BOTH,
        EngineKind.VLLM,
        24,
    )
    assert endpoint.display_name == "127.0.0.1:9000"
    limits = shortest.limits
    assert (limits.body, limits.body_budget, limits.body_min_rate) == (32 << 20, 512 << 20, 1024)
    assert (shortest.timeouts.connect, shortest.timeouts.first_byte, shortest.timeouts.stall) == (
        1.0,
        600.0,
        60.0,
    )
    assert (shortest.retries.budget, shortest.retries.floor, shortest.retries.attempts) == (
        0.2,
        3,
        3,
    )
    assert shortest.prefix.index == 256 << 20
    assert shortest.observability.access_flush == 0.2
    assert shortest.tenants == ()


def test_every_setting_can_be_given_and_is_converted_to_base_units(tmp_path: Path) -> None:
    loaded = config(
        tmp_path,
        SHORTEST
        + """\
        name: one
        role: decode
        engine: sglang
        served_model: meta/llama
        layout: {tp: 4, pp: 2, ep: 4, dp: 1}
        labels: {zone: a}
        max_concurrency: 48
        kv_tokens: 400_000
    policy: {name: least_loaded, parameters: {fresh_s: 2.5}}
    waiting_room: {size: 0, timeout: 1m30s}
models:
  - {name: llama, aliases: [default, no], pool: chat, context_tokens: 0x2000}
timeouts: {connect: 250ms}
limits: {body: 1.5MiB}
""",
    )
    (endpoint,) = loaded.pools["chat"].endpoints
    assert (endpoint.display_name, endpoint.role, endpoint.engine) == (
        "one",
        Role.DECODE,
        EngineKind.SGLANG,
    )
    assert (endpoint.layout.tp, endpoint.layout.pp, endpoint.layout.ep, endpoint.layout.dp) == (
        4,
        2,
        4,
        1,
    )
    assert (endpoint.labels["zone"], endpoint.kv_tokens) == ("a", 400_000)
    assert dict(loaded.pools["chat"].policy.params) == {"fresh_s": 2.5}
    assert loaded.pools["chat"].waiting_room.timeout == 90.0
    assert loaded.models[0].aliases == ("default", "no"), "since YAML 1.2, no is text"
    assert loaded.models[0].context_tokens == 8192
    assert (loaded.timeouts.connect, loaded.limits.body) == (0.25, 1572864)


def test_references_are_filled_in_from_the_environment_and_files(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-from-file\n")
    loaded = config(
        tmp_path,
        "version: 1\n"
        "listeners: {api: {port: '${PORT}'}}\n"
        "retries: {budget: '${BUDGET:-0.5}'}\n"
        "pools: {chat: {endpoints: [{url: 'http://${HOST:-gpu1}:${ENGINE_PORT}'}],\n"
        "  policy: {name: least_loaded, parameters: {fresh_s: '${FRESH:-2.5}'}}}}\n"
        "tenants: [{name: a, key: '${file:key}'}, {name: b, key: '${KEY}'},\n"
        "  {name: 'c$${x}', key: x}]\n",
        {"PORT": "9999", "ENGINE_PORT": "8000", "KEY": "sk-env", "HOST": ""},
    )
    assert loaded.listeners.api.port == 9999
    assert loaded.pools["chat"].endpoints[0].url == "http://gpu1:8000"
    assert [tenant.key.reveal() for tenant in loaded.tenants] == ["sk-from-file", "sk-env", "x"]
    assert (loaded.retries.budget, loaded.pools["chat"].policy.params["fresh_s"]) == (0.5, 2.5)
    assert loaded.tenants[2].name == "c${x}"


def test_a_secret_is_never_printed(tmp_path: Path) -> None:
    text = SHORTEST + "        api_key: ${KEY}\ntenants: [{name: a, key: '${KEY}'}]\n"
    loaded = config(tmp_path, text, {"KEY": "hunter2"})
    shown = (
        repr(loaded),
        str(loaded),
        loaded.model_dump_json(),
        str(loaded.model_dump()),
        repr(loaded.tenants[0].key),
    )
    assert not any("hunter2" in each for each in shown)
    assert loaded.tenants[0].key == Secret("hunter2")


def test_the_tree_is_immutable(tmp_path: Path) -> None:
    loaded = config(tmp_path, SHORTEST)
    with pytest.raises(ValidationError, match="frozen"):
        loaded.limits.body = 1  # type: ignore[misc]


def test_a_yaml_alias_may_be_used_several_times(tmp_path: Path) -> None:
    text = (
        "version: 1\npools:\n"
        "  a: {endpoints: [{url: http://h:1, layout: &big {tp: 8}}]}\n"
        "  b: {endpoints: [{url: http://h:2, layout: *big}]}\n"
        "models: [{name: m, pool: a}, {name: n, pool: b}]\n"
    )
    assert config(tmp_path, text).pools["b"].endpoints[0].layout.tp == 8


@pytest.mark.parametrize(
    ("layout", "hardware", "message"),
    [
        ("{tp: 16}", "{}", "tp 16 crosses link domains of 8 GPUs"),
        (
            "{tp: 72}",
            "{link_domain_gpus: 72}",
            "tp 72 does not divide the attention heads of most models",
        ),
        ("{tp: 16}", "{link_domain_gpus: 72}", None),
        ("{tp: 7}", "{}", "tp 7 does not divide the attention heads of most models"),
        ("{tp: 8, pp: 2}", "{gpus: 16}", None),
    ],
)
def test_an_unlikely_layout_causes_a_warning(
    tmp_path: Path, layout: str, hardware: str, message: str | None
) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(
        f"version: 1\nhardware: {hardware}\nmodels: [{{name: own, pool: main}}]\n"
        f"pools:\n  main:\n    endpoints:\n      - {{url: http://h:1, layout: {layout}}}\n"
    )
    warnings = load_with_warnings(file, {}).warnings
    assert [(each.line, each.path) for each in warnings] == (
        [] if message is None else [(7, "pools.main.endpoints[0].layout.tp")]
    )
    assert message is None or message in str(warnings[0])


def test_warnings_have_a_place(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(
        SHORTEST
        + "  spare: {endpoints: [{url: http://h:2}]}\n"
        + "models: [{name: m, pool: chat}]\n"
        + "listeners: {admin: {host: 0.0.0.0}}\n"
        + "tenants: [{name: a, key: sk-plain}]\n"
    )
    warned = [(each.line, each.path) for each in load_with_warnings(file, {}).warnings]
    assert warned == [(6, "pools.spare"), (8, "listeners.admin.host"), (9, "tenants[0].key")]
    assert "sk-plain" not in str(load_with_warnings(file, {}).warnings)


def test_a_configuration_can_be_built_from_engine_urls() -> None:
    built = config_from_engines(
        ["http://gpu1:8000", "http://gpu2:8000/"], "round_robin", "0.0.0.0", 9000, 9001
    ).config
    (pool,) = built.pools.values()
    assert [endpoint.url for endpoint in pool.endpoints] == ["http://gpu1:8000", "http://gpu2:8000"]
    assert pool.policy.name == "round_robin"
    assert (built.listeners.api.host, built.listeners.api.port, built.listeners.admin.port) == (
        "0.0.0.0",
        9000,
        9001,
    )
    assert built.models == (), "the engines list the models"


def test_a_key_for_engines_of_the_command_line_is_never_in_the_text() -> None:
    urls = ["http://gpu1:8000", "http://gpu2:8000"]
    loaded = config_from_engines(urls, "round_robin", "127.0.0.1", 0, 0, "sk-engine")
    (pool,) = loaded.config.pools.values()
    assert [spec.api_key.reveal() for spec in pool.endpoints if spec.api_key] == ["sk-engine"] * 2
    assert b"sk-engine" not in loaded.text
    assert loaded.warnings == ()
    with pytest.raises(ConfigError, match="must be printable ASCII, not empty") as caught:
        config_from_engines(urls, "round_robin", "127.0.0.1", 0, 0, "sk engine\n")
    assert "sk engine" not in str(caught.value)


@pytest.mark.parametrize("label", ["max_num_seqs", "max_num_batched_tokens"])
@pytest.mark.parametrize("stated", ["many", "0", "-1"])
def test_a_label_that_states_no_limit_of_a_step_is_rejected(
    tmp_path: Path, label: str, stated: str
) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(
        "version: 1\npools:\n  main:\n    endpoints:\n"
        f"      - {{url: http://h:1, labels: {{{label}: '{stated}'}}}}\n"
    )
    with pytest.raises(ConfigError, match=f"the label {label} must be a positive integer"):
        load_config(file, {})


def test_invalid_engine_urls_are_rejected_by_the_same_rules() -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_engines(["gpu1:8000"], "prefix_awre", "127.0.0.1", 8080, 8080)
    assert len(caught.value.problems) == 3


def test_the_schema_has_units_as_text_and_rejects_unknown_keys() -> None:
    schema = json_schema()
    assert schema["$defs"]["Timeouts"]["properties"]["connect"]["default"] == "1s"
    assert schema["$defs"]["Limits"]["properties"]["body"]["type"] == "string"
    assert schema["additionalProperties"] is False
    assert all(
        each.get("additionalProperties") is False
        for each in schema["$defs"].values()
        if "properties" in each
    )
    assert "parameters" in schema["$defs"]["PolicySpec"]["properties"]


def test_every_field_has_a_description() -> None:
    schema = json_schema()
    for name, section in [("Config", schema), *schema["$defs"].items()]:
        for key, field in section.get("properties", {}).items():
            assert field.get("description") or "$ref" in field, f"{name}.{key}"


def test_the_sample_file_is_valid_and_names_its_schema() -> None:
    sample = ROOT / "deploy" / "config" / "gateway.yaml"
    assert load_with_warnings(sample, {"TEAM_A_KEY": "sk-1"}).warnings == ()
    first = sample.read_text().splitlines()[0]
    assert first == "# yaml-language-server: $schema=gateway.schema.json"
    assert json.loads((sample.parent / "gateway.schema.json").read_text()) == json_schema()


def test_shared_secrets_may_come_from_files_and_cause_warnings_in_clear(tmp_path: Path) -> None:
    (tmp_path / "fleet").write_text("sixteen-characters-and-more\n")
    shared = "shared: {{redis: {{url: 'redis://127.0.0.1:6379', password: '{0}'}}, key: '{0}'}}\n"
    by_file = config(tmp_path, SHORTEST + shared.format("${file:fleet}")).shared
    assert by_file is not None
    assert by_file.key.reveal() == "sixteen-characters-and-more"
    assert by_file.redis.password is not None
    (tmp_path / "clear.yaml").write_text(SHORTEST + shared.format("sixteen-characters-in-clear"))
    clear = load_with_warnings(tmp_path / "clear.yaml", {})
    assert {problem.path for problem in clear.warnings} == {"shared.key", "shared.redis.password"}
    assert clear.has_secret_in_text


def secrets_of(
    annotation: Any, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[str | int, ...]]:
    # Yield the paths of all secrets in a type, with index 0 in lists and key "any" in mappings.
    if isinstance(annotation, type) and issubclass(annotation, Secret):
        yield path
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield from secrets_of(field.annotation, (*path, field.alias or name))
    else:
        inside = {tuple: (0,), Mapping: ("any",)}.get(get_origin(annotation), ())
        for argument in get_args(annotation):
            yield from secrets_of(argument, (*path, *inside))


def put(data: Any, path: tuple[str | int, ...], value: str) -> None:
    for part, after in pairwise(path):
        new: Any = [{}] if after == 0 else {}
        data = data[part] if part == 0 else data.setdefault(part, new)
    data[path[-1]] = value


def test_the_rules_about_secrets_know_every_secret_of_the_tree() -> None:
    data: dict[str, Any] = {}
    result = set(secrets_of(Config))
    assert ("tenants", 0, "key") in result
    for path in result:
        put(data, path, "in clear")
    assert set(secret_rules.secrets_in_clear(data)) == result


def test_a_collectors_key_may_come_from_a_file_and_causes_a_warning_in_clear(
    tmp_path: Path,
) -> None:
    (tmp_path / "token").write_text("by-file\n")
    traces = (
        "observability: {{traces: {{endpoint: 'http://127.0.0.1:4318/v1/traces', key: '{0}'}}}}\n"
    )
    by_file = config(tmp_path, SHORTEST + traces.format("${file:token}")).observability.traces
    assert by_file is not None
    assert by_file.key == Secret("by-file")
    (tmp_path / "clear.yaml").write_text(SHORTEST + traces.format("written-out"))
    clear = load_with_warnings(tmp_path / "clear.yaml", {})
    assert [problem.path for problem in clear.warnings] == ["observability.traces.key"]
    assert clear.has_secret_in_text


def test_a_reference_may_resolve_to_a_number_at_any_depth(tmp_path: Path) -> None:
    loaded = config(
        tmp_path,
        SHORTEST
        + "    admission: {name: priced, parameters: {bend: '${BEND}', "
        + "sessions: {start: '${START}'}, weights: {a: '${SHARE}'}}}\n"
        + "tenants: [{name: a, key: '${KEY}', priority: '${LOW}'}]\n",
        {"BEND": "0.5", "START": "0.8", "SHARE": "2", "KEY": "sk", "LOW": "-3"},
    )
    params = loaded.pools["chat"].admission.params
    assert params == {"bend": 0.5, "sessions": {"start": 0.8}, "weights": {"a": 2}}
    assert loaded.tenants[0].priority == -3


def test_escaped_braces_and_braces_in_values_are_not_references(tmp_path: Path) -> None:
    text = (
        SHORTEST
        + "tenants: [{name: '$${A}', key: '$${', slo: standard}, {name: b, key: '${KEY}'}]\n"
    )
    loaded = config(tmp_path, text, {"KEY": "a${b"})
    assert [tenant.key.reveal() for tenant in loaded.tenants] == ["$${", "a${b"]
    assert loaded.tenants[0].name == "${A}"


@pytest.mark.parametrize("url", ["http://H:80", "http://h/", "http://h"])
def test_an_endpoints_name_may_equal_its_default_name(tmp_path: Path, url: str) -> None:
    endpoints = f"[{{url: '{url}', name: 'h:80'}}, {{url: 'http://g:80'}}]"
    loaded = config(tmp_path, f"version: 1\npools: {{chat: {{endpoints: {endpoints}}}}}\n")
    assert [endpoint.display_name for endpoint in loaded.pools["chat"].endpoints] == [
        "h:80",
        "g:80",
    ]


def test_minimum_values_are_accepted(tmp_path: Path) -> None:
    loaded = config(
        tmp_path,
        SHORTEST
        + "    discover: {dns: 'engines:8000', interval: 10ms}\n    admission: priced\n"
        + "prefix: {index: 12KiB}\nhealth: {interval: 10ms}\nscrape: {interval: 10ms}\n"
        + "tenants: [{name: a, key: '${KEY}', weight: 1.0e-6}]\n",
        {"KEY": "sk"},
    )
    PrefixIndex(loaded.prefix.index)
    build_admission(
        "priced", {"weights": {tenant.name: tenant.weight for tenant in loaded.tenants}}
    )
    assert loaded.health.interval == loaded.scrape.interval == 0.01


def test_a_warning_names_patterns_of_models_that_overlap(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text("""\
version: 1
pools: {chat: {endpoints: [{url: http://127.0.0.1:9000}]}}
models:
  - {name: a, pool: chat, aliases: [claude-*, claude-opus-*, gpt-4]}
  - {name: b, pool: chat, aliases: [claude-haiku-*, "*-latest", gpt-*]}
""")
    warnings = [str(each).split(" ", 1)[1] for each in load_with_warnings(file, {}).warnings]
    assert warnings == [
        "models[1].aliases[0]: overlaps 'claude-*' (models[0].aliases[0]): "
        "'claude-haiku-*' gets names that match both",
        "models[1].aliases[1]: overlaps 'claude-*' (models[0].aliases[0]): "
        "'claude-*' gets names that match both",
        "models[1].aliases[1]: overlaps 'claude-opus-*' (models[0].aliases[1]): "
        "'claude-opus-*' gets names that match both",
    ]


@pytest.mark.parametrize("secret", ["key", "keys", "scoped_keys"])
def test_two_tenants_with_one_key_are_refused(tmp_path: Path, secret: str) -> None:
    other = {"key": "sk-1"}
    if secret == "keys":
        other = {"key": "sk-2", "keys": ["sk-1"]}
    elif secret == "scoped_keys":
        other = {"key": "sk-2", "scoped_keys": [{"key": "sk-1", "models": ["m"]}]}
    file = tmp_path / "gateway.yaml"
    tenants = [{"name": "a", "key": "sk-1"}, {"name": "b", **other}]
    pools = {"chat": {"endpoints": [{"url": "http://127.0.0.1:9000"}]}}
    file.write_text(json.dumps({"version": 1, "pools": pools, "tenants": tenants}))
    with pytest.raises(ConfigError, match="this key is already taken"):
        load_with_warnings(file, {})

"""Tests that other routers' configurations are converted completely, and no option is lost
silently.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.config import load_text
from gateway.config.root_section import Config
from gateway.migrate import Additions, Draft, MigrationError, convert_text, convert_words
from gateway.migrate.config_draft import NoteKind, variables
from tests.unit.gateway.migrate import published

DATA = Path("tests/data/migrate")
MODEL = Additions(model="example/large")


def converted(name: str, additions: Additions = MODEL) -> tuple[Draft, Config]:
    draft = convert_text((DATA / name).read_text(), None, additions)
    return draft, loaded(draft)


def loaded(draft: Draft) -> Config:
    env = dict.fromkeys(variables(draft.data), "some-secret-value")
    return load_text(draft.text("test").encode(), "gateway.yaml", env).config


def items(draft: Draft, kind: NoteKind) -> set[str]:
    return {note.item for note in draft.notes if note.kind is kind}


@pytest.mark.parametrize("file", sorted(path.name for path in DATA.iterdir()))
def test_every_file_becomes_a_valid_configuration(file: str) -> None:
    _, config = converted(file)
    assert config.pools


def test_vllm_router_keeps_its_engines_port_policy_and_limits() -> None:
    draft, config = converted("vllm-router.sh")
    pool = config.pools["engines"]
    assert [item.url for item in pool.endpoints] == [
        "http://10.1.0.11:8000",
        "http://10.1.0.12:8000",
        "http://10.1.0.13:8000",
    ]
    assert (config.listeners.api.host, config.listeners.api.port) == ("0.0.0.0", 30000)
    assert config.listeners.admin.host == "127.0.0.1"
    assert pool.policy.name == "consistent_hash"
    assert (pool.waiting_room.size, pool.waiting_room.timeout) == (64, 20.0)
    assert config.limits.body == 256 << 20
    assert (config.retries.attempts, config.health.failures, config.health.path) == (5, 3, "/ping")
    assert draft.get("pools", "engines", "endpoints")[0]["api_key"] == "${VLLM_KEY}"
    assert items(draft, NoteKind.DROPPED) == {
        "--cache-threshold",
        "--max-tree-size",
        "--request-id-headers",
        "--retry-initial-backoff-ms",
    }


@pytest.mark.parametrize(
    ("file", "dialect", "bootstraps"),
    [
        ("vllm-router-pd.sh", "mooncake", ["10.1.0.21:9100", "10.1.0.22:8998"]),
        ("sglang-router.sh", "sglang", ["10.2.0.1:8998", "10.2.0.2:8998"]),
    ],
)
def test_a_disaggregated_router_becomes_a_split(
    file: str, dialect: str, bootstraps: list[str]
) -> None:
    _, config = converted(file)
    assert config.models[0].split is not None
    assert config.models[0].split.dialect == dialect
    endpoints = config.pools["engines"].endpoints
    assert [item.bootstrap for item in endpoints if item.role == "prefill"] == bootstraps
    assert {item.role for item in endpoints} == {"prefill", "decode"}
    with pytest.raises(MigrationError, match="--model"):
        converted(file, Additions())


def test_cache_aware_keeps_its_thresholds() -> None:
    _, config = converted("sglang-router.sh")
    assert config.pools["engines"].policy.params == {
        "cache_threshold": 0.5,
        "balance_abs_threshold": 32,
        "balance_rel_threshold": 1.1,
    }


def test_a_manifest_with_discovery_names_the_service_to_create() -> None:
    draft, config = converted("smg-deployment.yaml")
    discover = config.pools["engines"].discover
    assert discover is not None
    assert discover.kubernetes is not None
    assert (discover.kubernetes.service, discover.kubernetes.port) == ("engines", "30000")
    assert discover.endpoint.engine == "sglang"
    assert any('"selector": {"app": "sglang", "tier": "gold"}' in note.text for note in draft.notes)


def test_the_production_stack_gets_a_pool_for_each_model() -> None:
    draft, config = converted("production-stack.sh")
    assert {model.name: model.pool for model in config.models} == {
        "Qwen/Qwen3-8B": "qwen3-8b",
        "example/small": "small",
    }
    assert config.models[0].aliases == ("chat",)
    assert {pool.policy.name for pool in config.pools.values()} == {"consistent_hash"}
    assert "--session-key x-user-id" in items(draft, NoteKind.TO_DO)
    _, config = converted("production-stack-settings.yaml")
    assert [len(pool.endpoints) for pool in config.pools.values()] == [2]


def test_the_production_stacks_chart_names_its_engines_services() -> None:
    _, config = converted("production-stack-values.yaml")
    pool = config.pools["qwen3-8b"]
    assert [(item.url, item.role, item.layout.tp) for item in pool.endpoints] == [
        ("http://vllm-llama-prefill-engine-service:8000", "prefill", 2),
        ("http://vllm-llama-decode-engine-service:8000", "decode", 2),
    ]
    assert config.models[0].context_tokens == 16384
    _, config = converted("production-stack-session.yaml", Additions(release="prod"))
    assert config.models[0].name == "opt"
    discover = config.pools["opt"].discover
    assert discover is not None
    assert discover.kubernetes is not None
    assert discover.kubernetes.service == "prod-opt125m-engine-service"


def test_providers_of_litellm_become_endpoints_with_their_kind_and_address() -> None:
    text = """
model_list:
- {model_name: big, litellm_params: {model: openai/gpt-4o-mini}}
- {model_name: local, litellm_params: {model: ollama/llama3.2, api_base: 'http://10.4.0.1:11434'}}
- {model_name: other, litellm_params: {model: groq/llama-3.1-8b, api_key: os.environ/OUR_KEY}}
"""
    draft = convert_text(text, None, Additions())
    endpoints = [pool["endpoints"][0] for pool in draft.data["pools"].values()]
    assert endpoints == [
        {
            "url": "https://api.openai.com",
            "engine": "openai",
            "api_key": "${OPENAI_API_KEY}",
        },
        {"url": "http://10.4.0.1:11434", "engine": "ollama"},
        {
            "url": "https://api.groq.com/openai",
            "engine": "openai",
            "api_key": "${OUR_KEY}",
        },
    ]
    assert [model["served_model"] for model in draft.data["models"]] == [
        "gpt-4o-mini",
        "llama3.2:latest",
        "llama-3.1-8b",
    ]


def test_litellm_groups_become_pools_models_and_overflow() -> None:
    draft, config = converted("litellm.yaml")
    models = {model.name: model for model in config.models}
    assert set(models) == {"chat", "small", "small-again"}
    assert [item.served_model for item in config.pools["chat"].endpoints] == [
        "Qwen/Qwen3-8B",
        "Qwen/Qwen3-8B-fp8",
    ]
    assert models["small"].pool == models["small-again"].pool
    assert models["small-again"].served_model == "example/adapter"
    assert [overflow.model for overflow in models["chat"].overflow] == ["small"]
    assert models["chat"].aliases == ("gpt-4",)
    assert config.pools["chat"].policy.name == "least_loaded"
    assert [tenant.name for tenant in config.tenants] == ["litellm"]
    dropped = items(draft, NoteKind.DROPPED)
    assert {"model_list[4] cloud", "model_list[5] *", "guardrails"} <= dropped
    assert {"router_settings.redis_host", "litellm_settings.cache"} <= dropped


def test_llm_d_scorers_become_weights_and_a_saturation_detector_an_admission() -> None:
    _, config = converted("llm-d.yaml")
    pool = config.pools["engines"]
    assert pool.policy.name == "llmd_blend"
    assert pool.policy.params["prefix_weight"] == 3
    assert pool.admission.name == "gie_saturation"
    assert pool.admission.params == {"queue_depth": 8, "kv_usage": 0.9}
    _, config = converted("llm-d-router-values.yaml")
    assert config.pools["engines"].policy.name == "consistent_hash"
    _, config = converted("llm-d-values.yaml")
    assert config.models[0].split is not None
    assert config.models[0].split.threshold_tokens == 1
    assert config.observability.traces is not None


BASES: dict[str, list[str]] = {
    "vllm-router": ["vllm-router", "--worker-urls", "http://engine:8000"],
    "sglang-router": ["smg", "--worker-urls", "http://engine:8000"],
    "production-stack": [
        *("vllm-router", "--static-backends", "http://engine:8000"),
        *("--static-models", "example/large"),
    ],
}


def facts(draft: Draft) -> dict[str, Any]:
    return {"data": draft.text("test"), "notes": [str(note) for note in draft.notes]}


@pytest.mark.parametrize(
    ("source", "option"),
    [
        *(("vllm-router", name) for name in published.VLLM_ROUTER),
        *(("sglang-router", name) for name in published.SMG),
        *(("production-stack", name) for name in published.PRODUCTION_STACK),
        *((source, "not-an-option") for source in BASES),
    ],
)
def test_every_option_changes_the_result_or_is_named(source: str, option: str) -> None:
    value = [] if option in published.FLAGS else [published.VALUES.get(option, "17")]
    words = [*BASES[source], f"--{option}", *value]
    without = facts(convert_words(BASES[source], source, Additions()))
    draft = convert_words(words, source, Additions())
    loaded_data, notes = facts(draft)["data"], [str(note) for note in draft.notes]
    assert loaded_data != without["data"] or any(option in note for note in notes)
    loaded(draft)


@pytest.mark.parametrize("redirection", ["> $log 2>&1 &", ">>router.log", "2> /dev/null < in"])
def test_redirections_of_a_shell_command_are_no_values(redirection: str) -> None:
    command = (
        "nohup python -u -m sglang_router.launch_router --pd-disaggregation --port 6688 "
        "--prefill http://10.0.0.1:8000 8995 --decode http://10.0.0.2:8000"
    )
    config = loaded(convert_text(f"export log=a.log\n{command} {redirection}\n", None, MODEL))
    urls = [item.url for item in config.pools["engines"].endpoints]
    assert urls == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]


def test_the_folder_of_a_router_is_not_taken_for_its_command() -> None:
    text = "cd /src/vllm-router && cargo run -- --policy random --worker-urls http://10.0.0.1:8000"
    with pytest.raises(MigrationError, match="--from"):
        convert_text(text, None, MODEL)
    config = loaded(convert_text(text, "vllm-router", MODEL))
    assert [item.url for item in config.pools["engines"].endpoints] == ["http://10.0.0.1:8000"]


def test_addresses_of_another_kv_connector_are_named_and_left_out() -> None:
    prefill, decode = "http://10.0.0.1:20003", "http://10.0.0.2:20005"
    words = ["vllm-router", "--vllm-pd-disaggregation", "--policy", "round_robin"]
    words += ["--prefill", f"{prefill}:zmq://10.0.0.1:21001"]
    words += ["--decode", f"{decode}:zmq://10.0.0.2:22001"]
    draft = convert_words(words, None, MODEL)
    assert [item.url for item in loaded(draft).pools["engines"].endpoints] == [prefill, decode]
    assert len(items(draft, NoteKind.DIFFERS)) == 2


def test_every_origin_may_call_the_api() -> None:
    origins = ["https://a.example.com", "https://b.example.com"]
    words = ["vllm-router", "--worker-urls", "http://10.0.0.1:8000", "--cors-allowed-origins"]
    config = loaded(convert_words([*words, *origins], None, MODEL))
    assert list(config.listeners.api.cors_origins) == origins


def test_plugins_of_llm_d_are_known_by_their_earlier_names() -> None:
    text = """
kind: EndpointPickerConfig
plugins: [{type: prefix-cache}, {type: kv-cache-scorer}, {type: max-score}, {type: single-profile}]
schedulingProfiles:
- name: default
  plugins: [{pluginRef: prefix-cache, weight: 3}, {pluginRef: kv-cache-scorer}]
"""
    additions = Additions(model="m", engines=("http://10.0.0.1:8000",))
    draft = convert_text(text, None, additions)
    policy = draft.get("pools", "engines", "policy")
    assert (policy["name"], policy["parameters"]["prefix_weight"]) == ("llmd_blend", 3.0)
    assert policy["parameters"]["kv_weight"] == 1.0
    assert not items(draft, NoteKind.DROPPED)


def test_a_decision_tree_of_llm_d_becomes_the_least_loaded_endpoint() -> None:
    text = """
kind: EndpointPickerConfig
plugins:
- {type: least-queue-filter}
- {type: decision-tree-filter, name: tree, parameters: {current: {pluginRef: least-queue-filter}}}
schedulingProfiles: [{name: default, plugins: [{pluginRef: tree}]}]
"""
    draft = convert_text(text, None, Additions(model="m", engines=("http://10.0.0.1:8000",)))
    assert draft.get("pools", "engines", "policy") == "least_loaded"
    assert items(draft, NoteKind.DIFFERS) == {"plugin least-queue-filter", "plugin tree"}


def test_servers_of_ones_own_and_openai_s_models_by_name_become_endpoints_of_litellm() -> None:
    text = """
model_list:
- {model_name: zephyr, litellm_params: {model: huggingface/acme/zephyr, api_base: 'http://10.0.0.1:80'}}
- {model_name: embed, litellm_params: {model: xinference/bge, api_base: 'http://10.0.0.2:9997/v1'}}
- {model_name: big, litellm_params: {model: gpt-4o, api_key: os.environ/OPENAI_API_KEY}}
- {model_name: hosted, litellm_params: {model: huggingface/acme/zephyr}}
"""
    draft = convert_text(text, None, Additions())
    config = loaded(draft)
    endpoints = {name: pool.endpoints[0] for name, pool in config.pools.items()}
    assert {name: (item.url, item.engine.value) for name, item in endpoints.items()} == {
        "zephyr": ("http://10.0.0.1:80", "tgi"),
        "embed": ("http://10.0.0.2:9997", "openai"),
        "big": ("https://api.openai.com:443", "openai"),
    }
    assert [model.served_model for model in config.models] == ["acme/zephyr", "bge", "gpt-4o"]
    assert items(draft, NoteKind.DROPPED) == {"model_list[3] hosted"}


def test_a_secret_in_the_source_is_not_copied() -> None:
    words = [*BASES["vllm-router"], "--api-key", "sk-very-secret"]
    draft = convert_words(words, None, Additions())
    assert "sk-very-secret" not in draft.text("test") + "".join(map(str, draft.notes))
    draft = convert_text((DATA / "litellm.yaml").read_text(), None, Additions())
    assert "sk-written-in-the-file" not in draft.text("test") + "".join(map(str, draft.notes))


def test_different_secrets_get_different_variables() -> None:
    draft = Draft()
    assert draft.refer("one", "KEY", "a") == "${KEY}"
    assert draft.refer("two", "KEY", "b") == "${KEY_2}"
    assert draft.refer("one", "KEY", "c") == "${KEY}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("echo hello", "name the router with --from: vllm-router"),
        ("just: yaml", "name the router with --from: vllm-router"),
        ("vllm-router --policy nothing --worker-urls http://e:1", "is unknown; known are"),
        ("vllm-router --port x --worker-urls http://e:1", "whole number"),
        ("vllm-router --policy random", "no engines"),
        ("vllm-router --worker-urls grpc://e:1", "no engines"),
        ("litellm --config config.yaml", "give the path of the file"),
        ("model_list: 3", "no model_list"),
        ("model_list: [{model_name: x, litellm_params: {model: bedrock/x}}]", "no deployment"),
        ("kind: EndpointPickerConfig", "no plugins"),
        ("routerSpec: {routingLogic: session}", "must list at least one engine"),
        ("echo 'never closed", "never closed"),
    ],
)
def test_what_cannot_be_converted_says_why(text: str, problem: str) -> None:
    with pytest.raises(MigrationError, match=problem):
        convert_text(text, None, Additions())

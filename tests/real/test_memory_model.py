"""Tests that `penstock size` computes the memory that vLLM itself allocates, with one and two
ranks.

vLLM builds the whole models without loading weights (deploy/real/memory_probe.py). Quantised models
are left out, because they need a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from policies.sizing.gpu_memory import stages
from policies.sizing.hf_parameter_count import shape_from_config
from policies.sizing.parallel_layout import Layout
from tests.real.engines import ENV, REAL, ROOT, free_ports

MODELS = ROOT / "tests" / "data" / "models"
KV_BYTES = 32 << 30
CONTEXT = 8192
ARCHITECTURES = {
    "llama-3.1-8b": "LlamaForCausalLM",
    "llama-3.2-1b": "LlamaForCausalLM",
    "qwen2.5-7b": "Qwen2ForCausalLM",
    "mixtral-8x7b": "MixtralForCausalLM",
    "qwen3-30b-a3b": "Qwen3MoeForCausalLM",
    "deepseek-v3": "DeepseekV3ForCausalLM",
    "gemma-3-27b": "Gemma3ForCausalLM",
    "gpt-oss-120b": "GptOssForCausalLM",
    "llama-4-scout": "Llama4ForCausalLM",
    "jamba-mini": "JambaForCausalLM",
}
KV_HEADS = {"mha": 32, "mqa": 1}  # variants of Llama 3.1 8B: as many KV heads as heads; only one


def _configs() -> dict[str, dict[str, Any]]:
    found = {}
    for name, architecture in ARCHITECTURES.items():
        members = json.loads((MODELS / f"{name}.json").read_text())
        members = members.get("text_config", members) | {"architectures": [architecture]}
        members.pop("quantization_config", None)
        found[name] = {"torch_dtype": "bfloat16", **members}
    for name, heads in KV_HEADS.items():
        found[name] = found["llama-3.1-8b"] | {"num_key_value_heads": heads}
    return found


@pytest.mark.parametrize("tp", [1, 2])
def test_weights_blocks_and_tokens_are_those_of_vllm(tmp_path: Path, tp: int) -> None:
    if not (REAL / "installed").exists():
        pytest.fail("the real engines are not installed; `make real` does it")
    configs = _configs()
    for name, members in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(members))
    figures = _probed(tmp_path, tp, list(configs))
    for name, members in configs.items():
        # On CPUs vLLM keeps recurrent states in float32.
        model = shape_from_config(members | {"mamba_ssm_dtype": "float32"}, name)
        vllm = figures[name]
        (stage,) = stages(model, Layout(tp))
        assert vllm["weights_bytes"] == pytest.approx([stage.weights_bytes] * tp, rel=0.01), name
        cached = [layer for layer in vllm["layers"] if layer["kind"] != "MambaSpec"]
        token_bytes = sum(layer["block_bytes"] / layer["block_tokens"] for layer in cached)
        assert stage.kv_token_bytes == pytest.approx(token_bytes, rel=0.01), name
        block_tokens = vllm["default_block_tokens"]
        kept = model.reserved_tokens(CONTEXT, tp, vllm["in_flight_tokens"], block_tokens)
        tokens = KV_BYTES * CONTEXT / (kept * stage.kv_token_bytes)
        assert tokens == pytest.approx(vllm["kv_cache_size_tokens"], rel=0.05), name


def _probed(folder: Path, tp: int, names: list[str]) -> dict[str, dict[str, Any]]:
    # Return the numbers that vLLM computes, by model.
    options = f"--dtype bfloat16 --max-model-len {CONTEXT}"
    done = subprocess.run(
        [
            *(REAL / "venv" / "bin" / "python", ROOT / "deploy" / "real" / "memory_probe.py"),
            *(str(tp), str(KV_BYTES)),
            *(f"{name} {options}" for name in names),
        ],
        cwd=folder,
        env={**os.environ, **ENV, "PROBE_PORT": str(free_ports(1)[0])},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stderr[-2000:]
    return {line["model"]: line for line in lines}

"""Tests that vLLM accepts the commands that `penstock size` prints for it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from typing import Any

import pytest

from policies.sizing.launch_commands import EngineLaunch, vllm_command
from policies.sizing.parallel_layout import Layout
from tests.real.engines import ENV, REAL, ROOT

MODEL = "meta-llama/Llama-3.1-70B-Instruct"
LAUNCHES = (
    EngineLaunch(MODEL, Layout(tp=4, pp=2), dtype="bfloat16", max_model_len=8192, port=9000),
    EngineLaunch(MODEL, Layout(tp=2), quantization="fp8", kv_dtype="fp8", max_num_seqs=24),
    EngineLaunch(MODEL, Layout(tp=4, dp=2, ep=8), served_name="chat", max_num_seqs=64),
    EngineLaunch(MODEL, Layout(tp=8, cp=2), kv_dtype="auto"),
    EngineLaunch(
        MODEL,
        Layout(tp=1, dp=16, ep=16),
        all_to_all="deepep_low_latency",
        has_eplb=True,
        spare_experts=32,
    ),
)
EXPECTED: tuple[dict[str, Any], ...] = (
    {
        "tensor_parallel_size": 4,
        "pipeline_parallel_size": 2,
        "dtype": "bfloat16",
        "max_model_len": 8192,
        "port": 9000,
    },
    {
        "tensor_parallel_size": 2,
        "quantization": "fp8",
        "kv_cache_dtype": "fp8",
        "max_num_seqs": 24,
    },
    {
        "tensor_parallel_size": 4,
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "max_num_seqs": 32,
    },
    {"tensor_parallel_size": 8, "decode_context_parallel_size": 2, "kv_cache_dtype": "auto"},
    {
        "data_parallel_size": 16,
        "enable_expert_parallel": True,
        "all2all_backend": "deepep_low_latency",
        "enable_eplb": True,
    },
)


def test_vllm_reads_every_flag_of_an_emitted_command_as_meant() -> None:
    if not (REAL / "installed").exists():
        pytest.fail("the real engines are not installed; `make real` does it")
    commands = [shlex.split(vllm_command(launch).replace("\\\n", " "))[2:] for launch in LAUNCHES]
    done = subprocess.run(
        [REAL / "venv" / "bin" / "python", ROOT / "deploy" / "real" / "vllm_flags.py"],
        input=json.dumps(commands),
        text=True,
        capture_output=True,
        env={**os.environ, **ENV},
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    read = [
        json.loads(line.removeprefix("parsed "))
        for line in done.stdout.splitlines()
        if line.startswith("parsed ")
    ]
    for launch, members, expected in zip(LAUNCHES, read, EXPECTED, strict=True):
        assert members["model_tag"] == launch.model
        assert {name: members[name] for name in expected} == expected

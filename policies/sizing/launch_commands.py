"""Builds the commands that launch vLLM, SGLang and TensorRT-LLM with a parallel layout.

Option names are those of vLLM 0.20 to 0.33, SGLang 0.5 and TensorRT-LLM 1.x. Options with the
engine's default value are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import msgspec

from policies.sizing.parallel_layout import Layout


class EngineLaunch(msgspec.Struct, frozen=True):
    """The settings with which an engine is launched.

    Fields that are None or False keep the engine's default.

    model          repository or folder of the model
    layout         parallel sizes of the engine
    served_name    the model's name in requests
    dtype          type of the weights
    quantization   method by which weights are quantised
    kv_dtype       type of the KV cache
    max_model_len  maximum tokens of prompt plus answer
    max_num_seqs   maximum number of sequences of the whole engine; for vLLM and TensorRT-LLM it is
                   divided by the number of ranks
    port           port of its HTTP server
    all_to_all     name of the all-to-all backend of vLLM or SGLang
    has_eplb       whether vLLM or SGLang balances experts over the ranks
    spare_experts  copies of experts that this balancing may place, over all ranks
    moe_tp         number of ranks over which TensorRT-LLM divides each expert; moe_tp times the
                   layout's ep is its TP
    """

    model: str
    layout: Layout = Layout()
    served_name: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    kv_dtype: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    port: int | None = None
    all_to_all: str | None = None
    has_eplb: bool = False
    spare_experts: int = 0
    moe_tp: int | None = None

    @property
    def rank_seqs(self) -> int | None:
        """Return the maximum number of sequences of one data-parallel rank; None: it is not set.

        It is the engine's number divided by its ranks, rounded up.
        """
        seqs = self.max_num_seqs
        return None if seqs is None else -(-seqs // self.layout.dp)


def vllm_command(launch: EngineLaunch, is_module: bool = False) -> str:
    """Return the command line that starts vLLM: `vllm serve ...`.

    If `is_module` is true, the command starts vLLM's server module with Python instead.
    """
    layout = launch.layout
    head = f"vllm serve {launch.model}"
    if is_module:
        head = f"python -m vllm.entrypoints.openai.api_server\n--model {launch.model}"
    flags = (
        *_sized("--tensor-parallel-size", layout.tp, least=0),
        *_sized("--pipeline-parallel-size", layout.pp),
        *_sized("--data-parallel-size", layout.dp),
        *_sized("--decode-context-parallel-size", layout.cp),
        *(_vllm_experts(launch) if layout.ep > 1 else []),
        *_given("--dtype", launch.dtype),
        *_given("--quantization", launch.quantization),
        *_given("--kv-cache-dtype", launch.kv_dtype),
        *_given("--max-model-len", launch.max_model_len),
        *_given("--max-num-seqs", launch.rank_seqs),
        *_given("--served-model-name", launch.served_name),
        *_given("--port", launch.port),
    )
    return _joined(head, flags)


def _vllm_experts(launch: EngineLaunch) -> Iterator[str]:
    yield "--enable-expert-parallel"
    yield from _given("--all2all-backend", launch.all_to_all)
    if launch.has_eplb:
        yield "--enable-eplb"
        if launch.spare_experts:
            yield f"--eplb-config '{json.dumps({'num_redundant_experts': launch.spare_experts})}'"


def sglang_command(launch: EngineLaunch) -> str:
    """Return the command line that starts SGLang: `python -m sglang.launch_server ...`.

    SGLang's tp-size is the number of all ranks, over which data-parallel attention is divided.
    """
    layout = launch.layout
    attention = f"--enable-dp-attention --dp-size {layout.dp}"
    flags = (
        f"--model-path {launch.model}",
        *_sized("--tp-size", layout.tp * layout.dp, least=0),
        *_sized("--pp-size", layout.pp),
        *_sized("--ep-size", layout.ep),
        *([attention] if layout.dp > 1 else []),
        *(["--enable-eplb"] if launch.has_eplb else []),
        *_sized("--ep-num-redundant-experts", launch.spare_experts if launch.has_eplb else 0, 0),
        *_given("--moe-a2a-backend", launch.all_to_all),
        *_given("--dtype", launch.dtype),
        *_given("--quantization", launch.quantization),
        *_given("--kv-cache-dtype", launch.kv_dtype),
        *_given("--context-length", launch.max_model_len),
        *_given("--max-running-requests", launch.max_num_seqs),
        *_given("--served-model-name", launch.served_name),
        *_given("--port", launch.port),
    )
    return _joined("python -m sglang.launch_server", flags)


def trtllm_options(launch: EngineLaunch) -> str:
    """Return a YAML file of options, for `trtllm-serve MODEL --extra_llm_api_options FILE`."""
    layout = launch.layout
    ranks = layout.tp * layout.dp
    lines = [f"tensor_parallel_size: {ranks}", f"pipeline_parallel_size: {layout.pp}"]
    if layout.ep > 1:
        moe_tp = launch.moe_tp or ranks // layout.ep
        lines += [
            f"moe_tensor_parallel_size: {moe_tp}",
            f"moe_expert_parallel_size: {layout.ep}",
        ]
    if layout.dp > 1:
        lines.append("enable_attention_dp: true")
    if launch.max_num_seqs is not None:
        lines.append(f"max_batch_size: {launch.rank_seqs}")
    if launch.max_model_len is not None:
        lines.append(f"max_seq_len: {launch.max_model_len}")
    if launch.kv_dtype is not None:
        lines.append(f"kv_cache_config: {{dtype: {launch.kv_dtype}}}")
    return "\n".join(lines) + "\n"


def _sized(flag: str, size: int, least: int = 1) -> Iterator[str]:
    if size > least:
        yield f"{flag} {size}"


def _given(flag: str, value: str | int | None) -> Iterator[str]:
    if value is not None:
        yield f"{flag} {value}"


def _joined(head: str, flags: Sequence[str]) -> str:
    return " \\\n  ".join([*head.split("\n"), *flags]) + "\n"

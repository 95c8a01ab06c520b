"""Creates a copy of the project in which Cython has translated modules to C files.

The copy is a normal setuptools project that builds with every supported version of Python.
compile.py builds it in place, and wheel.py builds wheels from it.
"""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from Cython.Build import cythonize
from Cython.Compiler import Options
from Cython.Compiler.ExprNodes import AnnotationNode, BitwiseOrNode, PyCFunctionNode
from Cython.Compiler.PyrexTypes import c_double_type
from setuptools import Extension

from tools.compile.declarations import declarations
from tools.compile.extension_classes import Project, project
from tools.compile.generated_code import improve

ROOT = Path(__file__).resolve().parents[2]
SOURCE_FOLDERS = ("command_line", "gateway", "policies", "kvtransfer", "mockgpu", "planner")
PROJECT_FILES = ("pyproject.toml", "README.md", "LICENSE")
SETUP = Path(__file__).with_name("extension_setup.py")
SMALL_LIST = "small_packages.txt"
"""Name of the file in the tree from which setup.py reads the list SMALL."""
SPINE = ("serve_request.py", "request_record.py", "routes_and_snapshot.py")
PACKAGES = (
    *(f"gateway/{name}" for name in ("protocol", "http", "admission", "fleet", "proxy", "disagg")),
    *(f"gateway/{name}" for name in ("forwarding", "metrics", "telemetry")),
    "policies",
)
"""The packages that serve requests; modules in them and their subpackages are compiled, unless they
are in OFF_PATH.
"""


def _modules(package: str, names: str) -> tuple[str, ...]:
    # Return the paths of modules of a package, from their names in one line of text.
    return tuple(f"{package}/{name}.py" for name in names.split())


OFF_PATH = (
    *("gateway/fleet/discovery", "policies/auto", "policies/golden", "policies/published"),
    "policies/sizing",
    *_modules("gateway/disagg", "failure_actions pairing state_machine"),
    *_modules("gateway/forwarding", "background_responses engine_refusal"),
    *_modules("gateway/fleet", "endpoint_registry rank_endpoints"),
    *_modules(
        "gateway/fleet",
        "endpoint_from_config model_alias_lookup probe_errors served_models speed_recovery",
    ),
    *_modules("gateway/fleet", "engine_capabilities health_checks probe_requests"),
    *_modules("gateway/fleet", "model_list_changes model_list_reader poll_schedule stall_limits"),
    *_modules("gateway/fleet", "temporary_limits"),
    *_modules("gateway/fleet/kv_events", "event_metrics event_reader_start zmq_addresses"),
    *_modules("gateway/fleet/kv_events", "prompt_learner tokenization zmq_subscription"),
    *_modules("gateway/http", "aiohttp_connection client_body_reader client_interface"),
    *_modules("gateway/http", "connect_errors engine_request head_errors health_api"),
    *_modules("gateway/http", "api_application listener_sockets open_listeners outgoing_tls"),
    *_modules("gateway/http", "socket_send tls_listener url_errors"),
    *_modules("gateway/metrics", "auto_metrics catalogue drift_metrics exposition labels"),
    *_modules("gateway/metrics", "mirror_metrics process_metrics quantile_sketch runtime_gauges"),
    *_modules("gateway/metrics", "trial_metrics"),
    *_modules(
        "gateway/protocol", "api_table byte_scan derived_secrets error_formats errors model_cards"
    ),
    *_modules("gateway/protocol", "message_bytes python_byte_scan python_message_bytes"),
    *_modules("gateway/protocol", "response_store_probe upstream_error"),
    *_modules("gateway/protocol/request", "http2_refusal image_size json_object lax_numbers"),
    *_modules("gateway/protocol/request", "allowed_tools multipart unknown_model"),
    *_modules("gateway/protocol/response", "engine_retry_after relay_state resume_eligibility"),
    *_modules("gateway/protocol/response", "whole_answer_to_stream"),
    *_modules("gateway/protocol/translate", "chat_types custom_tools token_counts"),
    *_modules("gateway/protocol/translate", "messages_conversation messages_request"),
    *_modules("gateway/protocol/translate", "request_reader responses_answer responses_input"),
    *_modules("gateway/protocol/translate", "responses_request"),
    *_modules("gateway/proxy", "context_length final_errors resume stored_responses tier_fallback"),
    *_modules("gateway/telemetry", "cost_counter operator_log otel_resource"),
    *_modules("gateway/telemetry", "span_attribute_names span_exporter spans"),
    *_modules("policies", "admission_registry builtin_policies engine_kinds param_types"),
    *_modules("policies", "policy_registry routing_types"),
    *_modules("policies", "restart_state"),
    *_modules("policies/admission", "admission_policy batch_reserve peer_quota_usage"),
    *_modules("policies/health", "endpoint_health slow_start"),
    *_modules("policies/prefix", "numpy_hash"),
    *_modules("policies/pricing", "model_tiers pull_decision rank_choice"),
)
"""Packages and modules inside PACKAGES that are not compiled. They run at the start, once per
request of a rare kind, after failures or for pages, or only define values. An extension module has
about ten times the size of its source.
"""
SMALL = (
    *("gateway/admission", "gateway/fleet/kv_events"),
    "gateway/protocol/translate",
    "policies/admission",
    *_modules("gateway", "routes_and_snapshot"),
    *_modules("gateway/disagg", "bootstrap_client handoffs pull_pauses"),
    *_modules("gateway/fleet", "endpoint_load_and_health engine_metrics live_endpoint"),
    *_modules("gateway/fleet", "speed_monitor updates_for_peers"),
    *_modules("gateway/http", "burst_reads close_queue connection_accept connection_fairness"),
    *_modules("gateway/http", "client_timeouts connection_limits engine_lookup_and_connect"),
    *_modules("gateway/http", "engine_poll_client large_body_allocation large_body_parsing"),
    *_modules("gateway/http", "long_engine_reads upload_read_turns"),
    *_modules("gateway/forwarding", "hedge"),
    *_modules("gateway/protocol", "cors stored_response_ids trace_context"),
    *_modules("gateway/protocol/request", "api_call api_keys cache_salts forwarded_headers"),
    *_modules("gateway/protocol/request", "json_members options_cache request_head"),
    *_modules("gateway/protocol/request", "media parameter_limits sequence_count"),
    *_modules("gateway/protocol/request", "service_level_headers sessions"),
    *_modules("gateway/protocol/response", "event_grammar long_event stream_end"),
    *_modules("gateway/protocol/response", "model_and_usage_rewrite retryable_start"),
    *_modules("gateway/protocol/response", "resumable_relay short_response token_ledger"),
    *_modules("gateway/proxy", "attempt_loop engine_api retry_permission"),
    *_modules("gateway/telemetry", "access_log access_log_file pick_explanation recent_requests"),
    *_modules("gateway/telemetry", "drift_records"),
    *_modules("policies", "policy_types scraped_load"),
    *_modules("policies/engine", "first_token_calibration kalman peer_load"),
    *_modules("policies/engine", "running_answer_lengths step_time"),
    *_modules("policies/health", "late_request_detection retry_budget speed_outlier"),
    *_modules("policies/prefix", "cached_blocks learned_prompts logged_block_ids prefix_match"),
    *_modules("policies/prefix", "predicted_cache sampled_keys"),
    *_modules("policies/pricing", "admission_cost session_placement split_decision transfer_time"),
)
"""Compiled packages and modules that take a few hundredths of a request's time at most, also if the
request is split. The C compiler optimizes them for size instead of speed.
"""
SHARED = "policies._cython"
"""Name of the extension module with the code that all others share."""
MODULES = (
    *(f"gateway/{name}" for name in SPINE),
    *sorted(
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
        and not {path.relative_to(ROOT).as_posix(), path.parent.relative_to(ROOT).as_posix()}
        & {*OFF_PATH}
    ),
)
HANDWRITTEN = (
    Path("gateway/http/_socket_send.c"),
    Path("gateway/protocol/_byte_scan.c"),
    Path("gateway/protocol/_message_bytes.c"),
    Path("gateway/protocol/request/_json_object.c"),
    Path("policies/prefix/_block_hash.c"),
)
"""Modules in C, which setup.py compiles like those that Cython generates."""
NOT_AN_ARGUMENT = object()
# A compiled module must behave exactly as its source: access to attributes of None raises, and
# annotations have no effect unless they name a C class.
# C classes are not pickled or copied, and the functions to do so would be a tenth of their modules.
DIRECTIVES = {
    "language_level": 3,
    "annotation_typing": True,
    "binding": True,
    "nonecheck": True,
    "auto_pickle": False,
    "emit_code_comments": False,
}


def _c_class_of(
    self: AnnotationNode, env: Any, assigned_value: object = NOT_AN_ARGUMENT
) -> tuple[list[str], Any]:
    # Return the modifiers and the C type of an annotation for Cython.
    #
    # Replaces AnnotationNode.analyse_type_annotation. Only C classes become C types, for arguments
    # and variables of functions. Other types have a wider meaning in Python: an int has any size, a
    # float may be an int, a str may be a subclass. Variables annotated as float become C doubles.
    if (
        assigned_value is NOT_AN_ARGUMENT
        and env.is_local_scope
        and self.expr.is_name
        and self.expr.name == "float"
    ):
        return [], c_double_type
    kind = self.expr.analyse_as_type(env)
    if (
        kind is None
        or not kind.is_extension_type
        or (assigned_value is NOT_AN_ARGUMENT and not env.is_local_scope)
    ):
        return [], None
    return (
        self.expr.analyse_pytyping_modifiers(env) if isinstance(self.expr, BitwiseOrNode) else []
    ), kind


def _without_annotations(
    self: PyCFunctionNode,
    env: Any,
    analyse: Callable[..., None] = PyCFunctionNode.analyse_default_args,
) -> None:
    # Create no dictionary of annotations for a function, after Cython has read what they declare.
    #
    # Nothing looks at the annotations of compiled functions. The code that creates the dictionaries
    # runs at each start.
    analyse(self, env)
    self.annotations_dict = None


def write_tree(out: Path) -> list[Path]:
    """Create the copy of the project with C files in the folder `out`, which is replaced.

    Returns the paths of the C files, relative to `out`.
    """
    shutil.rmtree(out, ignore_errors=True)
    for path in _project_files():
        copy = out / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    shutil.copy(SETUP, out / "setup.py")
    (out / SMALL_LIST).write_text("\n".join(SMALL))
    AnnotationNode.analyse_type_annotation = _c_class_of
    PyCFunctionNode.analyse_default_args = _without_annotations
    Options.docstrings = False
    shared = Path(*SHARED.split(".")).with_suffix(".c")
    with _working_directory(out):
        declared = _declare()
        cythonize(
            [Extension(SHARED, [str(shared)]), *MODULES],
            nthreads=os.cpu_count() or 1,
            compiler_directives=DIRECTIVES,
            shared_utility_qualified_name=SHARED,
            quiet=True,
        )
        for declaration in declared:
            declaration.unlink()
        generated = [Path(module).with_suffix(".c") for module in MODULES]
        for source in generated:
            source.write_text(improve(source.read_text()))
    return [shared, *generated]


@contextmanager
def _working_directory(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def tree_digest() -> str:
    """Return a hash of the sources and this generator, to know whether C files are current."""
    digest = hashlib.sha256()
    folder = ROOT / "tools" / "compile"
    generator = [*folder.glob("*.py"), *folder.glob("*.h")]
    for path in sorted([*_project_files(), *generator, ROOT / "requirements-compile.lock"]):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _project_files() -> Iterator[Path]:
    # Yield the files that a tree is copied from, without what earlier builds have left among them.
    #
    # In __pycache__, files appear and vanish while other processes import modules.
    for folder in SOURCE_FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            is_output = path.suffix in (".so", ".o") or "egg-info" in str(path.parent)
            is_output |= path.parent.name == "__pycache__"
            if path.is_file() and not is_output:
                yield path
    yield from (ROOT / name for name in PROJECT_FILES)


def _declare() -> list[Path]:
    known, written = read(Path()), []
    for source in map(Path, MODULES):
        if text := declarations(_module_name(source), known):
            written.append(source.with_suffix(".pxd"))
            written[-1].write_text(text)
    return written


def read(root: Path) -> Project:
    sources = [path for folder in SOURCE_FOLDERS for path in (root / folder).rglob("*.py")]
    trees = {_module_name(path.relative_to(root)): ast.parse(path.read_text()) for path in sources}
    return project(trees, [_module_name(Path(module)) for module in MODULES])


def _module_name(source: Path) -> str:
    return ".".join(source.with_suffix("").parts).removesuffix(".__init__")

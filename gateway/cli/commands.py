"""The table of all commands of `penstock`, in the order in which a new user needs them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType

COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "demo": (
            "gateway.cli.main:demo",
            "Start the gateway with mock TP groups on this machine, and show what to try.",
        ),
        "serve": (
            "gateway.cli.serve:serve",
            "Run the gateway for the engines in a configuration file, or "
            "for those given with --engine.",
        ),
        "mock": (
            "mockgpu.cli:mock",
            "Serve simulated LLM engines (TP groups) without a GPU, with vLLM's HTTP API.",
        ),
        "bench": (
            "planner.bench.cli:bench",
            "Put load on an OpenAI-compatible server, and measure "
            "latencies, throughput and goodput.",
        ),
        "replay": (
            "planner.replay.cli:replay",
            "Compare routing policies on recorded traffic, with simulated engines in virtual time.",
        ),
        "size": (
            "planner.size.cli:size",
            "Size a fleet for a model and promised latencies, and give reasons.",
        ),
        "seeds": (
            "planner.seeds.cli:seeds",
            "List 119 statements about LLM serving, with the command "
            "that tests each, and its outcome.",
        ),
        "golden": (
            "planner.golden.cli:golden",
            "Compare a candidate engine's answers to golden prompts with those of a base engine.",
        ),
        "drift": (
            "planner.drift.cli:drift",
            "Show whether recorded requests still have the shapes that a pool was sized for.",
        ),
        "check": (
            "gateway.cli.check:check",
            "Check a configuration file and print every problem with its line and column.",
        ),
        "migrate": (
            "gateway.cli.migrate:migrate",
            "Convert another router's command line or configuration file to a gateway.yaml.",
        ),
        "status": (
            "gateway.cli.status:status",
            "Show a running gateway's configuration version, its last error, and its endpoints.",
        ),
        "reload": (
            "gateway.cli.config_commands:reload",
            "Make a running gateway reload its configuration file now.",
        ),
        "diff": (
            "gateway.cli.config_commands:diff",
            "Show what a configuration file would change in a running "
            "gateway, without applying it.",
        ),
        "plan": (
            "gateway.cli.plan:plan",
            "Compare a new configuration with the running one on the recent access log.",
        ),
        "rollback": (
            "gateway.cli.config_commands:rollback",
            "Return a running gateway to an earlier configuration version.",
        ),
        "history": (
            "gateway.cli.config_commands:history",
            "List the configuration versions that have been applied, newest first.",
        ),
        "auto": (
            "gateway.cli.auto:auto",
            "Show how pools with the section `auto` choose their routing policy, or pin a policy.",
        ),
        "mirror": (
            "gateway.cli.mirror:mirror",
            "Show whether candidate engines answer live requests as well "
            "as the pools' own engines.",
        ),
        "drain": (
            "gateway.cli.drain:drain",
            "Stop routing new requests to an endpoint; its current requests finish.",
        ),
        "undrain": ("gateway.cli.drain:undrain", "Resume routing requests to a drained endpoint."),
        "top": (
            "gateway.cli.top.command:top",
            "Show all endpoints live in this terminal: states, latencies, KV flow and problems.",
        ),
        "explain": (
            "gateway.cli.explain:explain",
            "Explain how a request was routed: SLO, candidates with their scores, and outcome.",
        ),
        "doctor": (
            "gateway.cli.doctor.command:doctor",
            "Check engines and a configuration before production, with a fix for every problem.",
        ),
        "chaos": (
            "gateway.cli.chaos:chaos",
            "Inject a fault into mock TP groups and report how the gateway reacts.",
        ),
        "schema": ("gateway.cli.main:schema", "Print the JSON Schema of the configuration file."),
        "completion": (
            "gateway.cli.completion:completion",
            "Print the code with which a shell completes the commands of `penstock` "
            "and their options.",
        ),
        "version": (
            "gateway.cli.main:version",
            "Print the version, and whether the hot path is compiled or runs from sources.",
        ),
    }
)
"""By name: "module:function", and a summary.

The module is imported when the command runs. The summary is the first sentence of the function's
documentation, so that the list of commands is printed without importing all of them.
"""


def command_function(name: str) -> Callable[..., None]:
    """Import and return the function that implements the command `name` of `penstock`."""
    module, _, function = COMMANDS[name][0].partition(":")
    command: Callable[..., None] = getattr(importlib.import_module(module), function)
    return command

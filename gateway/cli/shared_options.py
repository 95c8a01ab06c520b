"""Options that several commands have: the admin server's address, JSON, policy, engine keys."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from command_line import Option, UsageError

DEFAULT_ADMIN_URL = "http://127.0.0.1:8081"
JsonOption = Annotated[bool, Option("--json", help="Print the result as JSON instead of text.")]
POLICY_HELP = "Routing policy: priced, prefix_aware, or any other name in docs/policies.md."
PolicyOption = Annotated[str | None, Option("--policy", help=POLICY_HELP)]
AdminPortOption = Annotated[
    int | None,
    Option(
        "--admin-port",
        min=0,
        max=65535,
        help="Port of the gateway's admin server, for operators and Prometheus.",
    ),
]
EngineKeyOption = Annotated[
    str | None,
    Option(
        "--engine-key",
        envvar="PENSTOCK_ENGINE_KEY",
        help="API key for the engines of --engine. Prefer PENSTOCK_ENGINE_KEY in the "
        "environment: other users of the machine can see command-line options.",
    ),
]


def check_engine_key(config: Path | None, engine_key: str | None) -> None:
    """Raise UsageError if the command line has both a key for engines and a configuration file.

    With a file, the keys must be in the file. A key in the environment variable PENSTOCK_ENGINE_KEY
    is accepted, because it may be meant for other commands.
    """
    is_option = engine_key is not None and engine_key != os.environ.get("PENSTOCK_ENGINE_KEY")
    if config is not None and is_option:
        raise UsageError(
            "with --config, set api_key for the endpoints in the file instead of --engine-key"
        )

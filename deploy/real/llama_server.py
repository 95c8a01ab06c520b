"""Runs llama.cpp's HTTP server with a GGUF model, for tests with a real engine.

Run `llama_server.py FILE PORT`. The package xllamacpp contains the same server as the program
`llama-server`.
"""

from __future__ import annotations

import signal
import sys

import xllamacpp

SLOTS, CONTEXT = 4, 8192


def main(model: str, port: int) -> None:
    """Serve the GGUF file `model` on a port of 127.0.0.1 until SIGTERM or SIGINT arrives."""
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.model_alias = model, {"tiny"}
    settings.hostnames, settings.port = ["127.0.0.1"], port
    settings.n_parallel, settings.n_ctx, settings.cpuparams.n_threads = SLOTS, CONTEXT, 1
    settings.endpoint_metrics = True
    server = xllamacpp.Server(settings)
    print(server.listening_address, flush=True)  # noqa: T201
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

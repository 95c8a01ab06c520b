"""Runs the KV store of this host until it is interrupted: `python -m kvtransfer.store`"""

from __future__ import annotations

import argparse
import logging
import re
import signal
import sys
from pathlib import Path

from kvtransfer.store.block_store import BlockStore
from kvtransfer.store.slot_format import SlotFileError
from kvtransfer.store.store_options import StoreOptions
from kvtransfer.store.unix_socket_server import StoreService

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


def size(text: str) -> int:
    """Return the bytes of a size such as "512MiB". Raises ValueError for any other text."""
    match = re.fullmatch(r"([0-9]+)([KMGT]iB)?", text)
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 65536, 64KiB or 8GiB")
    return int(match[1]) * _UNITS[match[2] or ""]


def parser() -> argparse.ArgumentParser:
    """Return the argument parser of the command `python -m kvtransfer.store`."""
    parser = argparse.ArgumentParser(
        "python -m kvtransfer.store",
        description="Run a store of KV blocks (keys and values of attention) for the engines of "
        "this host, in memory and on disk. Ctrl-C ends it.",
    )
    parser.add_argument("socket", type=Path, help="Path of the Unix socket to listen on.")
    parser.add_argument(
        "--block",
        type=size,
        required=True,
        help="Size of the largest block to store, for example 2MiB.",
    )
    parser.add_argument(
        "--memory", type=size, required=True, help="Memory for blocks, for example 64GiB."
    )
    parser.add_argument(
        "--disk",
        type=size,
        default=0,
        help="Disk space for blocks that no longer fit in memory, for example 1TiB. Default: none.",
    )
    parser.add_argument(
        "--directory",
        default="",
        help="Directory for the file with the blocks on disk; required with --disk.",
    )
    parser.add_argument(
        "--lease",
        type=float,
        default=30.0,
        help="Maximum seconds for which an engine may read blocks in memory. Afterwards the "
        "store may overwrite them. Default: 30.",
    )
    return parser


def main() -> int:
    """Run the store and return its exit status: 2 for invalid options, 1 if it cannot start."""
    logging.basicConfig(format="%(levelname)s %(message)s")
    options = parser().parse_args()
    # Wait for signals on this thread alone, so that no call is interrupted.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        limits = StoreOptions(
            slot_bytes=options.block,
            memory_bytes=options.memory,
            disk_bytes=options.disk,
            directory=options.directory,
            lease_s=options.lease,
        )
        service = StoreService(BlockStore(limits), options.socket)
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except (OSError, SlotFileError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    sys.stdout.write(f"ready {options.socket}\n")
    sys.stdout.flush()
    signal.sigwait((signal.SIGINT, signal.SIGTERM))
    service.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

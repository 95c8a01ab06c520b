"""A process that writes blocks to a KV store, or reads them, until a test kills it.

python -m tests.chaos.store_peer SOCKET write SEED       stores blocks until it is killed
python -m tests.chaos.store_peer SOCKET tear SEED        sends half of a block, reports it, waits
python -m tests.chaos.store_peer SOCKET read COUNT KEY   reads one block COUNT times
python -m tests.chaos.store_peer SOCKET hold KEY         leases a block, reports it, waits

The bytes of a block follow from its key, so that readers recognise wrong ones. The last line of a
reader has the numbers of right, missing and wrong blocks.
"""

from __future__ import annotations

import hashlib
import socket
import sys
from pathlib import Path
from random import Random

from kvtransfer.store.client import StoreClient
from kvtransfer.store.socket_io import receive_message
from kvtransfer.store.store_messages import VERSION, AcquireBlocks, Greeting, PutBlocks, encode

BLOCK_BYTES = 256 << 10


def key_of(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


def content_of(key: bytes) -> bytes:
    return hashlib.shake_128(key).digest(4096) * (BLOCK_BYTES // 4096)


def read(client: StoreClient, count: int, key: bytes) -> tuple[int, int, int]:
    # Return the numbers of right, missing and wrong blocks.
    expected, tally = content_of(key), [0, 0, 0]
    for _ in range(count):
        copy = bytearray(BLOCK_BYTES)
        found = client.get([key], [[memoryview(copy)]])
        tally[1 if not found else 0 if copy == expected else 2] += 1
    return tally[0], tally[1], tally[2]


def write(client: StoreClient, seed: int) -> None:
    rng = Random(seed)
    while True:
        keys = [key_of(rng.randrange(1 << 20)) for _ in range(16)]
        client.put(keys, [[memoryview(content_of(key))] for key in keys])
        print("wrote", flush=True)


def tear(path: str, seed: int) -> None:
    key = key_of(seed)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    connection.sendall(encode(Greeting(VERSION)) + encode(PutBlocks([key], [BLOCK_BYTES])))
    receive_message(connection)
    receive_message(connection)
    connection.sendall(bytes(16) + content_of(key)[: BLOCK_BYTES // 2])
    print("torn", flush=True)
    sys.stdin.read()


def hold(path: str, key: bytes) -> None:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    connection.sendall(encode(Greeting(VERSION)) + encode(AcquireBlocks([key])))
    receive_message(connection)
    receive_message(connection)
    print("held", flush=True)
    sys.stdin.read()


def main(path: str, role: str, *rest: str) -> None:
    if role == "tear":
        tear(path, int(rest[0]))
    elif role == "hold":
        hold(path, bytes.fromhex(rest[0]))
    else:
        with StoreClient(Path(path), 60.0) as client:
            print("ready", flush=True)
            if role == "write":
                write(client, int(rest[0]))
            else:
                print(*read(client, int(rest[0]), bytes.fromhex(rest[1])), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

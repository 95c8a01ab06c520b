"""Tests of a KV block store as real processes, in which the clients or the store are killed."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from kvtransfer.store.client import StoreClient
from tests.chaos.store_peer import BLOCK_BYTES, content_of, key_of

PATIENCE_S = 60.0
PEER = (sys.executable, "-m", "tests.chaos.store_peer")
MEMORY, DISK = 64 << 20, 256 << 20
READERS, READS = 8, 50


@contextmanager
def process(*words: object) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(
        [sys.executable, "-m", *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


@contextmanager
def store(path: Path, *options: object) -> Iterator[subprocess.Popen[str]]:
    sizes = ("--block", BLOCK_BYTES, "--memory", MEMORY, *options)
    with process("kvtransfer.store", path / "s", *sizes) as started:
        assert said(started).startswith("ready")
        yield started


@contextmanager
def peer(path: Path, role: str, *rest: object) -> Iterator[subprocess.Popen[str]]:
    with process("tests.chaos.store_peer", path / "s", role, *rest) as started:
        yield started


def said(started: subprocess.Popen[str]) -> str:
    assert started.stdout is not None
    line = started.stdout.readline()
    assert line, "the process has died"
    return line.strip()


def connected(path: Path) -> StoreClient:
    return StoreClient(path / "s", PATIENCE_S)


def put(client: StoreClient, *numbers: int) -> int:
    keys = [key_of(number) for number in numbers]
    return client.put(keys, [[memoryview(content_of(key))] for key in keys])


def wrong_blocks(client: StoreClient, numbers: range) -> tuple[int, int]:
    # Return how many of these blocks were read, and how many of them had a wrong byte.
    read = wrong = 0
    for number in numbers:
        copy = bytearray(BLOCK_BYTES)
        if client.get([key_of(number)], [[memoryview(copy)]]):
            read += 1
            wrong += copy != content_of(key_of(number))
    return read, wrong


def until(condition: object, patience_s: float = PATIENCE_S) -> None:
    assert callable(condition)
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.01)


def kib(pid: int, field: str) -> int:
    match = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert match is not None
    return int(match[1])


def test_eight_processes_read_one_block_while_writers_evict_around_it(tmp_path: Path) -> None:
    key = key_of(1)
    with store(tmp_path) as running, connected(tmp_path) as client:
        put(client, 1)
        with peer(tmp_path, "write", 7) as writer:
            said(writer)
            readers = [
                subprocess.Popen(
                    [*PEER, tmp_path / "s", "read", str(READS), key.hex()],
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for _ in range(READERS)
            ]
            answers = [reader.communicate(timeout=PATIENCE_S)[0].split() for reader in readers]
            said(writer)
        tallies = [tuple(map(int, answer[1:])) for answer in answers]
        right = sum(tally[0] for tally in tallies)
        assert sum(tally[2] for tally in tallies) == 0, "wrong bytes"
        assert right > 0
        assert sum(map(sum, tallies)) == READERS * READS
        until(lambda: client.stats()["leases"] == 0)
        assert client.stats()["memory_blocks"] <= client.stats()["memory_slots"]
        assert running.poll() is None


def test_a_writer_killed_in_the_middle_of_a_block_leaves_nothing_readable(tmp_path: Path) -> None:
    with store(tmp_path) as running, connected(tmp_path) as client:
        for seed in range(6):
            with peer(tmp_path, "tear", seed) as writer:
                assert said(writer) == "torn"
                writer.kill()
                writer.wait()
            until(lambda seed=seed: client.stats()["aborted"] == seed + 1)
            assert client.count_prefix([key_of(seed)]) == 0
        assert put(client, *range(6)) == 6
        assert wrong_blocks(client, range(6)) == (6, 0)
        assert running.poll() is None


def test_writers_killed_at_random_moments_never_leave_a_wrong_byte(tmp_path: Path) -> None:
    rng = Random(5)
    with store(tmp_path) as running, connected(tmp_path) as client:
        for seed in range(5):
            with peer(tmp_path, "write", seed) as writer:
                said(writer)
                time.sleep(rng.random() * 0.1)
                writer.kill()
                writer.wait()
        draws = (Random(seed) for seed in range(5))
        written = [draw.randrange(1 << 20) for draw in draws for _ in range(200)]
        keys = [number for number in written if client.count_prefix([key_of(number)])]
        assert keys, "the writers stored something"
        for number in keys:
            assert wrong_blocks(client, range(number, number + 1))[1] == 0
        assert put(client, -1 % (1 << 63)) == 1
        assert running.poll() is None


def test_a_killed_reader_gives_its_blocks_back(tmp_path: Path) -> None:
    with store(tmp_path, "--lease", 1e6), connected(tmp_path) as client:
        put(client, 1)
        with peer(tmp_path, "hold", key_of(1).hex()) as reader:
            assert said(reader) == "held"
            assert client.stats()["leases"] == 1
            reader.kill()
            reader.wait()
            until(lambda: client.stats()["leases"] == 0)


def test_a_store_killed_while_it_saves_serves_only_right_bytes_after_its_restart(
    tmp_path: Path,
) -> None:
    disk = ("--disk", DISK, "--directory", tmp_path / "disk")
    rng, size = Random(6), 100
    for start in range(0, 4 * size, size):
        with store(tmp_path, *disk) as running, connected(tmp_path) as client:
            found, wrong = wrong_blocks(client, range(start))
            assert wrong == 0
            assert (found > 0) == (start > 0), "blocks are found after a restart"
            assert client.stats()["corrupt"] == 0
            put(client, *range(start, start + size))
            until(lambda client=client: client.stats()["saved"] > 0)
            time.sleep(rng.random() * 0.2)
            running.kill()
            running.wait()


def test_the_memory_of_a_full_store_stays_within_its_bound(tmp_path: Path) -> None:
    bound = 768 << 20
    disk = ("--disk", 64 << 20, "--directory", tmp_path / "disk")
    with store(tmp_path, "--memory", bound, *disk) as running, connected(tmp_path) as client:
        slots, number = client.stats()["memory_slots"], 0
        assert slots * BLOCK_BYTES > bound * 0.99
        data = memoryview(bytearray(BLOCK_BYTES))
        while number < slots * 1.2:
            keys = [key_of(number + index) for index in range(256)]
            client.put(keys, [[data]] * len(keys))
            number += len(keys)
        assert client.stats()["memory_blocks"] == slots
        peak = kib(running.pid, "VmHWM") << 10
        print(f"peak RSS {peak / bound:.4f} of the bound of {bound >> 20} MiB, {slots} blocks")
        assert peak <= bound * 1.05

"""Tests of what a mock engine fetches from the host's KV store, and how long that takes.

Time is simulated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import pytest

from gateway.cli.main import run as penstock
from gateway.fleet.kv_events.event_decoder import RemovedBlocks, StoredBlocks, decode_batch
from kvtransfer.store.block_store import BlockStore
from kvtransfer.store.store_options import StoreOptions
from kvtransfer.store.unix_socket_server import StoreService
from mockgpu.http.choice_and_stop_reason import Choice
from mockgpu.kv_bytes import KvMemory, scaled_layout
from mockgpu.kv_events.numbered_event_batches import KvEventSpec, KvEventStream
from mockgpu.kv_events.store_announcer import StoreAnnouncer
from mockgpu.kv_options import StoreSpec
from mockgpu.kv_store import StoreTier
from mockgpu.mock_tokenizer import block_keys, generate, salt_keys, token_count
from mockgpu.scheduler import Job
from mockgpu.tp_group import GroupSpec, TpGroup
from policies.sizing.gpus import gpu_named
from policies.sizing.model_shapes import model_named
from tests.command_runner import CommandRunner
from tests.sim.jumping_loop import JumpingLoop, Stamps

MODEL, H100 = model_named("demo-8b"), gpu_named("h100")
BLOCK_BYTES = 16 * 512  # bytes of a block of demo-8b at the default scale
TOKENS_8K = 8192

Result = TypeVar("Result")


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    # Run a store whose disk has ten times the blocks of its memory, and yield its path.
    options = StoreOptions(
        slot_bytes=BLOCK_BYTES,
        memory_bytes=20 << 20,
        disk_bytes=64 << 20,
        directory=str(tmp_path / "disk"),
        save_s=3600.0,
    )
    service = StoreService(BlockStore(options), tmp_path / "s")
    SERVICES[tmp_path / "s"] = service
    yield tmp_path / "s"
    if SERVICES.pop(tmp_path / "s", None) is not None:
        service.close()


SERVICES: dict[Path, StoreService] = {}


def run(main: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    loop = JumpingLoop()
    try:
        return loop.run_until_complete(main())
    finally:
        loop.close()


async def inline(call: Callable[[], Any]) -> Any:
    # Calls of the store take no simulated time, so that figures do not depend on the machine.
    return call()


def group_of(path: Path | None, tp: int = 1, **speeds: float) -> TpGroup:
    spec = GroupSpec("m", MODEL, H100, tp, kv_tokens=40_000)
    group = TpGroup(spec, asyncio.get_running_loop())
    layout = scaled_layout(MODEL, tp)
    group.attach(KvMemory.create(layout, group.scheduler.pool.total, "kv"))
    if path is not None:
        store = StoreSpec(str(path), **speeds)
        compatibility = f"{MODEL.name}/{layout.fingerprint()}"
        group.kv_store = StoreTier(group, store, MODEL.kv_token_bytes, compatibility, run=inline)
    return group


def choice(name: str, tokens: int, output_tokens: int = 8, salt: str = "") -> Choice:
    prompt = (name.encode().ljust(60, b".") + b"\n" * 4) * (tokens // 16)
    keys = block_keys(prompt)
    speech = generate(prompt, keys, output_tokens, False, 0)
    job = Job(token_count(prompt), output_tokens, salt_keys(speech.keys, salt))
    made = Choice(0, prompt, speech.tokens, speech.text, "length", None, job, speech.keys, 0, salt)
    job.content = made
    made.describe_job()
    return made


async def answered(group: TpGroup, made: Choice) -> float:
    # Compute a request and wait until its KV is saved; return its TTFT in simulated seconds.
    loop = asyncio.get_running_loop()
    began, stamps = loop.time(), Stamps(loop)
    group.submit(made.job, stamps, "length")
    while not stamps.ended_s:
        await asyncio.sleep(0.01)
    while group.kv_store is not None and group.kv_store.running_tasks:
        await asyncio.sleep(0.01)
    return stamps.tokens_s[0] - began


async def ended(*groups: TpGroup) -> None:
    for group in groups:
        assert group.metrics.tainted == 0, "wrong bytes"
        group.scheduler.pool.check()
        assert group.scheduler.pool.usage == 0
        group.close()
        if group.kv_store is not None:
            await group.kv_store.close()
        assert group.memory is not None
        group.memory.close()


def test_a_returning_8k_prompt_has_its_first_token_in_half_the_time_of_computing_it(
    path: Path,
) -> None:
    async def main() -> tuple[float, float, int]:
        group = group_of(path)
        computed_s = await answered(group, choice("a", TOKENS_8K))
        group.scheduler.pool.clear_prefix_cache()
        again = choice("a", TOKENS_8K)
        fetched_s = await answered(group, again)
        await ended(group)
        return computed_s, fetched_s, again.job.cached

    computed_s, fetched_s, cached = run(main)
    print(f"TTFT of 8,192 tokens: {computed_s:.4f} s computed, {fetched_s:.4f} s from memory")
    assert cached == TOKENS_8K - 16, "the last token is always computed"
    assert fetched_s <= 0.5 * computed_s


async def answered_and_saved(group: TpGroup, path: Path, made: Choice) -> float:
    # Compute a request as `answered` does; the store has all of it on disk afterwards.
    seconds = await answered(group, made)
    while SERVICES[path].store.save_step():
        pass
    return seconds


async def with_known_disk(group: TpGroup, path: Path) -> float:
    # Fill the store and fetch prompts from its disk, so that the engine knows the disk's speed.
    #
    # Returns the TTFT of a computed prompt. Afterwards the prompts a and e are only on disk.
    computed_s = await answered_and_saved(group, path, choice("a", TOKENS_8K))
    for name in "bcdefghibcd":  # the store's memory holds four of these prompts
        group.scheduler.pool.clear_prefix_cache()
        await answered_and_saved(group, path, choice(name, TOKENS_8K))
    group.scheduler.pool.clear_prefix_cache()
    return computed_s


@pytest.mark.parametrize("disk_gbps", [10.0, 40.0, 60.0, 100.0, 400.0])
def test_a_prompt_on_disk_is_fetched_or_computed_whichever_is_faster(
    path: Path, disk_gbps: float
) -> None:
    async def main() -> tuple[float, float, int]:
        group = group_of(path, disk_gbps=disk_gbps)
        computed_s = await with_known_disk(group, path)
        made = choice("a", TOKENS_8K)
        returned_s = await answered(group, made)
        await ended(group)
        return computed_s, returned_s, made.job.cached

    computed_s, returned_s, cached = run(main)
    bytes_moved = (TOKENS_8K - 16) * MODEL.kv_token_bytes
    last_step_s = 0.0233  # seconds to compute the tokens that are never fetched
    fetched_s = bytes_moved / (disk_gbps * 1e9 / 8) + bytes_moved / 25e9 + last_step_s
    print(
        f"{disk_gbps} Gb/s: TTFT of 8,192 tokens {computed_s:.4f} s computed, {fetched_s:.4f} s "
        f"fetched, {returned_s:.4f} s chosen"
    )
    assert returned_s <= 1.02 * min(computed_s, fetched_s)
    assert cached == (TOKENS_8K - 16 if fetched_s < computed_s else 0)


def test_a_slow_disk_is_used_while_the_engine_computes_other_prompts(path: Path) -> None:
    async def main() -> tuple[int, int]:
        group = group_of(path, disk_gbps=40.0)
        assert group.kv_store is not None
        await with_known_disk(group, path)
        before = group.kv_store.disk_tokens
        loop = asyncio.get_running_loop()
        others = [choice(f"other {i}", TOKENS_8K - 1024) for i in range(3)]
        made, stamps = choice("e", TOKENS_8K), Stamps(loop)  # the prompt is only on disk
        group.scheduler.pool.clear_prefix_cache()
        for job in (*(other.job for other in others), made.job):
            group.submit(job, stamps if job is made.job else Stamps(loop), "length")
        while not stamps.ended_s or group.kv_store.running_tasks:
            await asyncio.sleep(0.01)
        await ended(group)
        return group.kv_store.disk_tokens - before, made.job.cached

    read, cached = run(main)
    assert cached == TOKENS_8K - 16
    assert read > 0


def test_another_engine_of_the_host_fetches_what_the_first_one_computed(path: Path) -> None:
    async def main() -> None:
        first, second = group_of(path, tp=2), group_of(path, tp=2)
        one, two = choice("shared", 1024), choice("shared", 1024)
        await answered(first, one)
        await answered(second, two)
        assert (one.job.cached, two.job.cached) == (0, 1008)
        assert one.text == two.text
        assert second.kv_store is not None
        assert second.kv_store.hit_tokens == 1008
        await ended(first, second)

    run(main)


def test_another_layout_or_tenant_fetches_nothing(path: Path) -> None:
    async def main() -> None:
        first, second = group_of(path), group_of(path, tp=2)
        await answered(first, choice("shared", 1024, salt="mine"))
        for group, salt in ((first, "theirs"), (second, "mine")):
            made = choice("shared", 1024, salt=salt)
            await answered(group, made)
            assert made.job.cached == 0
            assert group.kv_store is not None
            assert group.kv_store.hit_tokens == 0
        await ended(first, second)

    run(main)


def test_only_what_the_engines_own_cache_lacks_is_fetched(path: Path) -> None:
    async def main() -> None:
        first, second = group_of(path), group_of(path)
        await answered(second, choice("shared", 512))
        await answered(first, choice("shared", 1024))
        made = choice("shared", 1024)
        await answered(second, made)
        assert made.job.cached == 1008
        assert second.kv_store is not None
        assert second.kv_store.hit_tokens == 1008 - 512
        cached = choice("shared", 1024)
        await answered(second, cached)
        assert second.kv_store.hit_tokens == 1008 - 512, "all is cached here"
        await ended(first, second)

    run(main)


def test_answers_are_saved_for_the_next_turn(path: Path) -> None:
    async def main() -> None:
        group = group_of(path)
        first = choice("turn", 256, output_tokens=64)
        await answered(group, first)
        group.scheduler.pool.clear_prefix_cache()
        prompt = first.prompt + first.tokens + b"and?" * 16
        speech = generate(prompt, block_keys(prompt), 4, False, 0)
        job = Job(token_count(prompt), 4, speech.keys)
        second = Choice(
            0, prompt, speech.tokens, speech.text, "length", None, job, speech.keys, 0, ""
        )
        job.content = second
        second.describe_job()
        await answered(group, second)
        # The block of the last answered token is full only with the next token.
        assert job.cached == 256 + 48
        await ended(group)

    run(main)


def test_an_engine_whose_store_is_killed_computes_and_uses_the_next_store(path: Path) -> None:
    async def main() -> None:
        group = group_of(path)
        await answered(group, choice("a", 512))
        SERVICES.pop(path).close()
        group.scheduler.pool.clear_prefix_cache()
        lost = choice("a", 512)
        await answered(group, lost)
        assert lost.job.cached == 0
        assert group.kv_store is not None
        assert group.kv_store.store.lost_calls > 0
        options = StoreOptions(slot_bytes=BLOCK_BYTES, memory_bytes=8 << 20)
        SERVICES[path] = StoreService(BlockStore(options), path)
        group.kv_store.store._retry_at_s = 0.0
        await answered(group, choice("b", 512))
        group.scheduler.pool.clear_prefix_cache()
        found = choice("b", 512)
        await answered(group, found)
        assert found.job.cached == 496
        await ended(group)
        SERVICES.pop(path).close()

    run(main)


def test_a_client_that_leaves_during_a_fetch_frees_all_blocks(path: Path) -> None:
    async def main() -> None:
        group = group_of(path, gbps=0.1)
        await answered(group, choice("a", 1024))
        group.scheduler.pool.clear_prefix_cache()
        made = choice("a", 1024)
        group.submit(made.job, Stamps(asyncio.get_running_loop()), "length")
        await asyncio.sleep(1.0)
        assert group.scheduler.fetching
        group.abort(made.job)
        assert group.kv_store is not None
        while group.kv_store.running_tasks:
            await asyncio.sleep(0.1)
        await ended(group)

    run(main)


def test_a_group_does_not_start_without_its_store(tmp_path: Path, path: Path) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="no store can be reached at"):
            group_of(tmp_path / "none")

    run(main)


def test_blocks_larger_than_the_stores_slots_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        options = StoreOptions(slot_bytes=BLOCK_BYTES - 1, memory_bytes=1 << 20)
        service = StoreService(BlockStore(options), tmp_path / "small")
        with pytest.raises(ValueError, match="do not fit"):
            group_of(tmp_path / "small")
        service.close()

    run(main)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kv-store", "/none"], "no store can be reached at /none"),
        (["--kv-store", "/none", "--kv-store-gbps", "5"], "must be two speeds"),
        (["--kv-store", "/none", "--kv-store-gbps", "5,-1"], "must be two speeds"),
        (["--kv-store", "/none", "--dp-ranks", "2"], "supports only tensor parallelism"),
        (["--kv-store", "/none", "--pp", "2"], "supports only tensor parallelism"),
        (["--kv-store", "/none", "--kv-scale", "2"], "--kv-scale must be"),
    ],
)
def test_unusable_options_are_refused(options: list[str], message: str) -> None:
    result = CommandRunner().invoke(penstock, ["mock", "--port", "0", *options])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_a_speed_of_0_is_no_limit() -> None:
    assert StoreSpec("p", inf, inf).bytes_s == inf


def published(stream: KvEventStream) -> list[tuple[str, int, int]]:
    # Return (kind, number of blocks, medium's bit) of each new event.
    batches = [decode_batch(payload) for _, payload in stream.flush(0.0, 0.0)]
    return [
        ("stored" if isinstance(event, StoredBlocks) else "removed", len(event.names), event.medium)
        for batch in batches
        for event in batch.events
        if isinstance(event, StoredBlocks | RemovedBlocks)
    ]


@pytest.mark.parametrize("form", ["map", "array"])
def test_events_say_where_the_store_has_the_blocks_of_this_engine(form: str) -> None:
    CPU, STORAGE = 2, 4

    async def main() -> None:
        tiers = dict.fromkeys(("k0", "k1", "k2"), 1)

        async def places(keys: Any) -> bytes:
            return bytes(tiers[key] for key in keys)

        stream = KvEventStream(KvEventSpec(form=form), 16, lambda kind: False)
        announcer = StoreAnnouncer(stream, places)
        announcer.track(choice("a", 48).job, list(tiers), 0)  # type: ignore[arg-type]
        await announcer.check()
        assert published(stream) == [("stored", 3, CPU)]
        tiers["k0"] = tiers["k1"] = 3
        await announcer.check()
        assert published(stream) == [("stored", 2, STORAGE)]
        tiers["k1"] = 2
        tiers["k2"] = 0
        await announcer.check()
        assert published(stream) == [("removed", 1, CPU), ("removed", 1, CPU)]
        stream.on_cleared()
        stream.flush(0.0, 0.0)
        await announcer.check()
        assert published(stream) == [("stored", 1, CPU), ("stored", 2, STORAGE)]
        announcer.close()

    run(main)

"""Tests that all workers apply a configuration change, and that new workers start with it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from gateway.config import ConfigError, load_text, load_with_warnings
from gateway.reload.history import VersionHistory, create_version
from gateway.reload.reloader import PUT_NAME, ChangeOptions
from gateway.workers.config_rollout import ConfigRollout
from gateway.workers.worker_process import Worker, WorkerResponse

TEXT = "version: 1\nadmin: {{key: '${{file:key}}'}}\npools: {{p: {{policy: {0}, endpoints: [{{url: 'http://h:1'}}]}}}}\n"
OLD, NEW, BAD = TEXT.format("round_robin"), TEXT.format("least_loaded"), TEXT.format("least_laden")


class Stub:
    def __init__(self, number: int, file: Path) -> None:
        self.number = number
        self._file = file
        self.version = 1
        self.text, self.digest = file.read_bytes(), load_with_warnings(file, {}).digest
        self.asked: list[str] = []
        self.before: Callable[[], None] = lambda: None
        self.lost_at = self.refuses_at = ""

    async def request(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> WorkerResponse:
        self.before()
        self.asked.append(path)
        if path == self.lost_at:
            raise TimeoutError
        if path == self.refuses_at:
            return self._answer("rejected", "not this time")
        text = self._file.read_bytes() if body is None else body
        try:
            digest = load_text(text, str(self._file), {}).digest
        except ConfigError as error:
            return self._answer("rejected", str(error))
        if digest == self.digest:
            return self._answer("unchanged")
        if "dry_run" in path:
            return self._answer("dry_run")
        self.text, self.digest = text, digest
        self.version += 1
        return self._answer("applied")

    def _answer(self, result: str, message: str = "") -> WorkerResponse:
        body_out = {"result": result, "message": message, "version": self.version}
        return WorkerResponse(200, {}, json.dumps(body_out).encode())


class House:
    def __init__(self, folder: Path, text: str = OLD) -> None:
        self.file, self.key = folder / "gateway.yaml", folder / "key"
        self.file.write_text(text)
        self.key.write_text("sk-1")
        self.workers = [Stub(number, self.file) for number in range(2)]
        self.said: list[str] = []
        self.lost: list[Stub] = []
        self.configured = ConfigRollout(
            load_with_warnings(self.file, {}),
            self.file,
            {},
            lambda: cast("list[Worker]", self.workers),
            lambda line, bad: self.said.append(line),
            lambda worker: self.lost.append(cast("Stub", worker)),
        )
        self.configured.set_version_number(1)

    def agree(self, text: str) -> bool:
        # Return whether all workers and a new worker would run this configuration.
        return {each.text for each in self.workers} == {
            text.encode()
        } and self.configured.running.text == text.encode()


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


async def test_a_touched_file_or_changed_secret_does_not_undo_a_rollback(house: House) -> None:
    house.file.write_text(NEW)
    await house.configured.reload_changed_files()
    assert house.agree(NEW)
    await house.configured.rollback(None)
    assert house.agree(OLD)
    await house.configured.reload_changed_files()
    house.key.write_text("sk-2")
    await house.configured.reload_changed_files()
    assert house.agree(OLD)
    assert [each.digest for each in house.workers] == [house.configured.running.digest] * 2, (
        "the secret is the new one"
    )
    house.file.write_text(NEW + "# edited\n")
    await house.configured.reload_changed_files()
    assert house.agree(NEW + "# edited\n")


async def test_a_check_of_the_files_that_waits_for_a_sent_text_does_not_undo_it(
    house: House,
) -> None:
    # The first check after the start counts as a change of the files.
    async with house.configured.lock:
        put = asyncio.create_task(house.configured.put(NEW.encode(), {}))
        await asyncio.sleep(0)
        check = asyncio.create_task(house.configured.reload_changed_files())
        for _ in range(3):
            await asyncio.sleep(0.01)
    await asyncio.gather(put, check)
    assert house.agree(NEW)


async def test_an_edit_during_a_reload_is_applied_by_the_next_check(house: House) -> None:
    house.file.write_text(NEW)
    house.workers[0].before = lambda: cast("None", house.file.write_text(NEW + "# more\n"))
    await house.configured.reload_changed_files()
    await house.configured.reload_changed_files()
    assert house.agree(NEW + "# more\n")


async def test_a_worker_that_may_differ_from_the_others_is_replaced(house: House) -> None:
    house.workers[1].lost_at = "/config?force=1"
    await house.configured.put(NEW.encode(), {})
    assert house.lost == [house.workers[1]]
    assert house.configured.running.text == NEW.encode()


async def test_a_worker_that_does_not_respond_prevents_one_change_and_is_replaced(
    house: House,
) -> None:
    house.workers[1].lost_at = "/config?dry_run=1&record_rejection=1"
    answer = await house.configured.put(NEW.encode(), {})
    assert (answer.status, house.lost, house.agree(OLD)) == (503, [house.workers[1]], True)


async def test_workers_record_a_rejection_until_the_file_is_valid_again(house: House) -> None:
    house.file.write_text(BAD)
    await house.configured.reload_changed_files()
    await house.configured.reload_changed_files()
    assert (len(house.said), house.agree(OLD)) == (1, True)
    assert set(house.workers[0].asked) == {"/config/reload?dry_run=1&record_rejection=1"}
    house.file.write_text(OLD)
    await house.configured.reload_changed_files()
    assert [each.asked[-1] for each in house.workers] == ["/config/reload?force=1"] * 2
    await house.configured.reload_changed_files()
    assert house.workers[0].asked[-1] == "/config/reload?dry_run=1&record_rejection=1", (
        "there is nothing to take back any more"
    )
    assert house.configured.version == 1


async def test_a_dry_run_is_not_reported_to_the_operator(house: House) -> None:
    answer = await house.configured.put(BAD.encode(), {}, ChangeOptions(dry_run=True))
    assert json.loads(answer.body)["result"] == "rejected"
    assert (house.said, house.workers[0].asked) == ([], ["/config?dry_run=1"])


async def test_rollback_to_a_version_from_before_a_restart(tmp_path: Path) -> None:
    kept = f"reload: {{state_dir: {tmp_path / 'state'}}}\n"
    (tmp_path / "key").write_text("sk-1")
    before = create_version(
        6, 0.0, "start", load_text((OLD + kept).encode(), str(tmp_path / "gateway.yaml"), {}), ()
    )
    VersionHistory(tmp_path / "state").write(before, has_secret=False)
    house = House(tmp_path, NEW + kept)
    house.configured.set_version_number(7)
    for worker in house.workers:
        worker.version = 7
    assert house.configured.version == 7
    await house.configured.rollback(6)
    assert house.agree(OLD + kept)
    assert house.configured.version == 8


async def test_a_worker_that_rolled_back_is_replaced_because_it_counts_more_versions(
    house: House,
) -> None:
    house.workers[1].refuses_at = "/config?force=1"
    answer = await house.configured.put(NEW.encode(), {})
    assert json.loads(answer.body)["result"] == "rejected"
    assert house.agree(OLD)
    assert [each.version for each in house.workers] == [3, 1]
    assert (house.lost, house.configured.version) == ([house.workers[0]], 1)


@pytest.mark.parametrize("number", [0, 1])
async def test_a_worker_that_read_a_secret_early_is_replaced_to_keep_version_numbers_equal(
    tmp_path: Path, number: int
) -> None:
    house = House(tmp_path, OLD)
    house.key.write_text("sk-2")
    sooner = house.workers[number]
    # The worker has been restarted in the meantime.
    sooner.digest = load_with_warnings(house.file, {}).digest
    await house.configured.reload_changed_files()
    assert sooner.version == 1
    assert (house.lost, house.configured.version) == ([sooner], 2)


async def test_differing_version_numbers_become_the_largest_with_the_next_change(
    house: House,
) -> None:
    house.workers[1].version = 5
    await house.configured.put(NEW.encode(), {})
    assert (house.lost, house.configured.version) == ([house.workers[0]], 6)


async def test_a_rollback_uses_the_same_file_name_as_the_workers(house: House) -> None:
    await house.configured.put(NEW.encode(), {})
    await house.configured.rollback(1)
    assert house.agree(OLD)
    # `was_in_force`: the references of the text need not be those in use.
    kept = [
        "/config?dry_run=1&record_rejection=1&was_in_force=1",
        "/config?force=1&was_in_force=1",
    ]
    assert house.workers[0].asked[-2:] == kept
    assert Path(house.configured.running.file).name == PUT_NAME

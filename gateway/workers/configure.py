"""Changing the configuration of all workers or of none: everybody tries it first, then everybody takes it.

Who fails at taking what it had tried makes all others go back. A worker that starts is given what is in force.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.config import ConfigError, Loaded, examine, examine_text
from gateway.reload.reloader import SENT, Say
from gateway.reload.versions import KEEP
from gateway.workers.process import LOST, Answer, Worker

GOOD = ("applied", "unchanged")
TRIED = ("dry_run", "unchanged")


class Configured:
    """What is in force in all workers. `running` is what a worker that starts is given; one change at a time."""

    def __init__(
        self,
        loaded: Loaded,
        file: Path | None,
        env: Mapping[str, str],
        workers: Callable[[], Sequence[Worker]],
        say: Say,
    ) -> None:
        self.running = loaded
        self.file = file
        self._env = env
        self._workers = workers
        self._say = say
        self._rejected: tuple[str, ...] = ()
        self._missing: tuple[Path, ...] = ()
        self._kept: dict[int, Loaded] = {1: loaded}
        self.one_at_a_time = asyncio.Lock()

    @property
    def version(self) -> int:
        """The number of what is in force."""
        return max(self._kept)

    def numbered(self, version: int) -> None:
        """What all begin with has this number: versions of before are kept in a folder."""
        self._kept = {version: self.running}

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every file that what is in force, or what was rejected last, is made of."""
        own = () if self.file is None else (self.file,)
        return tuple(dict.fromkeys((*own, *self.running.references, *self._missing)))

    async def changed(self) -> None:
        """A file that matters was touched."""
        if self.file is not None:
            await self.reload()

    async def reload(self, *, dry_run: bool = False) -> Answer:
        """Take over the file as it is now."""
        file = self.file
        if file is None:
            return _answer(409, "nothing", "there is no file: the engines were given on the command line")
        try:
            loaded = await asyncio.to_thread(examine, file, self._env)
            self._missing = ()
        except ConfigError as error:
            loaded = None
            self._missing = error.references
        return await self._change("/config/reload", None, {}, loaded, dry_run=dry_run)

    async def put(self, text: bytes, headers: Mapping[str, str], *, dry_run: bool = False) -> Answer:
        """Take over a text that somebody sent, if `If-Match` holds for the eldest worker."""
        name = str((self.file.parent if self.file is not None else Path()) / SENT)
        try:
            loaded = await asyncio.to_thread(examine_text, text, name, self._env)
        except ConfigError:
            loaded = None
        match = {"If-Match": headers["If-Match"]} if "If-Match" in headers else {}
        return await self._change("/config", text, match, loaded, dry_run=dry_run)

    async def rollback(self, number: int | None) -> Answer:
        """Take over an older version: that number, or the one before the one in force."""
        older = (each for each in self._kept if each < self.version)
        wanted = number if number is not None else max(older, default=None)
        loaded = None if wanted is None else self._kept.get(wanted)
        if loaded is None:
            told = f"no version {number} is kept" if number is not None else "no older version is kept"
            return _answer(409, "nothing", told)
        return await self._change("/config", loaded.text, {}, loaded)

    async def _change(
        self, path: str, text: bytes | None, match: dict[str, str], loaded: Loaded | None, *, dry_run: bool = False
    ) -> Answer:
        async with self.one_at_a_time:
            workers = self._workers()
            if not workers:
                return _answer(503, "nothing", "no worker is ready")
            try:
                tried = await asyncio.gather(*self._ask(workers, f"{path}?dry_run=1", text, match))
            except LOST as error:
                return _answer(503, "nothing", f"a worker did not answer: {error!r}; nothing was changed")
            refused = next((each for each in tried if result_of(each) not in TRIED), None)
            if refused is not None:
                self._tell(refused, bad=True)
                return refused
            if dry_run or loaded is None or all(result_of(each) == "unchanged" for each in tried):
                self._rejected = ()
                return tried[0]
            return await self._carry_out(workers, path, text, loaded)

    async def _carry_out(self, workers: Sequence[Worker], path: str, text: bytes | None, loaded: Loaded) -> Answer:
        done = await asyncio.gather(*self._ask(workers, path, text, {}), return_exceptions=True)
        answers = [each for each in done if isinstance(each, Answer)]
        failed = [each for each in answers if result_of(each) not in GOOD]
        if failed or not answers:
            before = self.running.text
            moved = [
                worker
                for worker, each in zip(workers, done, strict=True)
                if isinstance(each, Answer) and result_of(each) == "applied"
            ]
            await asyncio.gather(*self._ask(moved, "/config", before, {}), return_exceptions=True)
            told = "a worker could not take over what it had tried; all went back"
            return failed[0] if failed else _answer(503, "nothing", told)
        self.running = loaded
        applied = next((each for each in answers if result_of(each) == "applied"), answers[0])
        self._kept[self.version + 1] = loaded
        for number in sorted(self._kept)[:-KEEP]:
            del self._kept[number]
        self._tell(applied, bad=False)
        return applied

    def _ask(
        self, workers: Sequence[Worker], path: str, text: bytes | None, match: dict[str, str]
    ) -> list[Coroutine[Any, Any, Answer]]:
        """The eldest is asked whether If-Match holds: it knows all versions."""
        key = self.running.config.admin.key
        headers = {} if key is None else {"Authorization": f"Bearer {key.reveal()}"}
        method = "POST" if text is None else "PUT"
        return [
            worker.ask(method, path, text, headers | (match if not at else {})) for at, worker in enumerate(workers)
        ]

    def _tell(self, answer: Answer, *, bad: bool) -> None:
        """One line to the operator; the same rejection once."""
        message = str(_json(answer).get("message", ""))
        if bad and self._rejected == (message,):
            return
        self._rejected = (message,) if bad else ()
        self._say(message, bad)


def result_of(answer: Answer) -> str:
    """What came of it, as a worker calls it."""
    return str(_json(answer).get("result", ""))


def _json(answer: Answer) -> dict[str, object]:
    try:
        found = json.loads(answer.body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _answer(status: int, result: str, message: str) -> Answer:
    body = {"result": result, "message": message, "changes": [], "problems": [], "needs_restart": []}
    return Answer(status, {"Content-Type": "application/json"}, json.dumps(body).encode())

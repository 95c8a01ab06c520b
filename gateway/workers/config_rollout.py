"""Changing the configuration of all workers or of none: everybody tries it first, then everybody takes it.

Who fails at taking what it had tried makes all others go back. A worker that starts is given what is in force. A
version has one number in all of them: who counts otherwise begins anew with the number that holds.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from time import time

import msgspec

from gateway.config import ConfigError, Loaded, examine, examine_text
from gateway.config.file_reader import raw_bytes
from gateway.reload.history import Versions, made
from gateway.reload.reloader import CHANGE, SENT, ChangeOptions, Say, do_nothing
from gateway.workers.worker_process import LOST, Answer, Worker

GOOD = ("applied", "unchanged")
TRIED = ("dry_run", "unchanged")


class Configured:
    """What is in force in all workers. `running` is what a worker that starts is given; one change at a time.

    lost  is told of a worker that may not have taken what the others took, or counts otherwise: it must begin anew
    """

    def __init__(
        self,
        loaded: Loaded,
        file: Path | None,
        env: Mapping[str, str],
        workers: Callable[[], Sequence[Worker]],
        say: Say,
        lost: Callable[[Worker], None],
    ) -> None:
        self.running = loaded
        self.file = file
        self._env = env
        self._workers = workers
        self._say = say
        self._lost = lost
        self._rejected = ""  # what was said of the last change, if it was refused
        self._missing: tuple[Path, ...] = ()
        self._file_text: bytes | None = loaded.text  # as it was taken over; None: it was refused
        folder = loaded.config.reload.state_dir
        self._versions = Versions(None if folder is None else Path(folder))
        self.one_at_a_time = asyncio.Lock()
        self.on_applied: Callable[[str], Awaitable[None]] = do_nothing

    @property
    def version(self) -> int:
        """The number of what is in force."""
        kept = self._versions.all()
        return kept[-1].number if kept else 1

    def numbered(self, version: int) -> None:
        """What is in force has this number, as the eldest worker says, who writes versions if there is a folder."""
        self._versions.add(made(version, time(), "", self.running, ()))

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every file that what is in force, or what was rejected last, is made of."""
        own = () if self.file is None else (self.file,)
        return tuple(dict.fromkeys((*own, *self.running.references, *self._missing)))

    async def changed(self) -> None:
        """A file that matters was touched: take over the file if it was edited, or else what is in force with what its
        references lead to now."""
        if self.file is not None and await asyncio.to_thread(self._edited, self.file):
            await self.reload()
        if self.running.text != self._file_text and await asyncio.to_thread(self._moved):
            options = ChangeOptions(kept=True)
            await self._change("/config", self.running.text, {}, lambda: self._sent(self.running.text), options)

    def _edited(self, file: Path) -> bool:
        """Whether the file is to be looked at: it is in force, or is not what it was when it was taken over last."""
        try:
            return self.running.text == self._file_text or raw_bytes(file) != self._file_text
        except ConfigError:
            return True

    def _moved(self) -> bool:
        """Whether a reference of what is in force leads elsewhere now."""
        try:
            return self._once_more().digest != self.running.digest
        except ConfigError:
            return True

    def _once_more(self) -> Loaded:
        return examine_text(self.running.text, self.running.file, self._env)

    async def reload(self, options: ChangeOptions = CHANGE) -> Answer:
        """Take over the file as it is now."""
        file = self.file
        if file is None:
            return _answer(409, "nothing", "there is no file: the engines were given on the command line")

        return await self._change("/config/reload", None, {}, lambda: examine(file, self._env), options)

    async def put(self, text: bytes, headers: Mapping[str, str], options: ChangeOptions = CHANGE) -> Answer:
        """Take over a text that somebody sent, if `If-Match` holds for the eldest worker."""
        match = {"If-Match": headers["If-Match"]} if "If-Match" in headers else {}
        return await self._change("/config", text, match, lambda: self._sent(text), options)

    def _sent(self, text: bytes) -> Loaded:
        """As the workers read what is put to them: a version is known by its file's name, too."""
        name = str((self.file.parent if self.file is not None else Path()) / SENT)
        return examine_text(text, name, self._env)

    async def rollback(self, number: int | None, options: ChangeOptions = CHANGE) -> Answer:
        """Take over an older version: that number, or the one before the one in force."""
        older = [each for each in self._versions.all() if each.number < self.version]
        wanted = self._versions.find(number) if number is not None else (older[-1] if older else None)
        if wanted is None:
            told = f"no version {number} is kept" if number is not None else "no older version is kept"
            return _answer(409, "nothing", told)
        if wanted.text is None:
            told = f"the text of version {wanted.number} was not kept: a secret stands in it"
            return _answer(409, "nothing", told)
        text = wanted.text.encode()
        options = msgspec.structs.replace(options, kept=True)
        return await self._change("/config", text, {}, lambda: self._sent(text), options, trigger="rollback")

    async def _change(
        self,
        path: str,
        text: bytes | None,
        match: dict[str, str],
        read: Callable[[], Loaded],
        options: ChangeOptions = CHANGE,
        trigger: str = "change",
    ) -> Answer:
        """`text` is None for the file's. What is wrong with it the workers say: they read it too."""
        async with self.one_at_a_time:
            missing: tuple[Path, ...] = ()
            loaded: Loaded | None = None
            try:
                loaded = await asyncio.to_thread(read)
            except ConfigError as error:
                missing = error.references
            before = self.version
            answer = await self._take_over(path, text, match, loaded, options)
            if self.version != before:
                await self.on_applied(trigger)
            if text is None and not options.dry_run:
                taken = loaded is not None and result_of(answer) in GOOD
                self._file_text, self._missing = loaded.text if loaded is not None and taken else None, missing
            return answer

    async def _take_over(
        self, path: str, text: bytes | None, match: dict[str, str], loaded: Loaded | None, options: ChangeOptions
    ) -> Answer:
        workers = self._workers()
        if not workers:
            return _answer(503, "nothing", "no worker is ready")
        trial = f"{path}?dry_run=1" if options.dry_run else f"{path}?dry_run=1&noted=1"
        if options.force:
            trial += "&force=1"
        if options.kept:
            trial += "&kept=1"
        tried = await self._told(workers, trial, text, match)
        if len(tried) < len(workers):
            return _answer(503, "nothing", "a worker did not answer and is replaced; nothing was changed")
        answers = list(tried.values())
        refused = next((each for each in answers if result_of(each) not in TRIED), None)
        if refused is not None and not options.dry_run:
            self._tell(refused, bad=True)
        if refused is not None or options.dry_run or loaded is None:
            return refused or answers[0]
        if all(result_of(each) == "unchanged" for each in answers) and not self._rejected:
            self._now(loaded, self.version)
            return answers[0]
        return await self._carry_out(workers, path, text, loaded, options)

    async def _carry_out(
        self, workers: Sequence[Worker], path: str, text: bytes | None, loaded: Loaded, options: ChangeOptions
    ) -> Answer:
        kept = "&kept=1" if options.kept else ""
        told = await self._told(workers, f"{path}?force=1{kept}", text, {})  # whether it can be reached was found out
        answers = list(told.values())
        failed = [each for each in answers if result_of(each) not in GOOD]
        if failed or not answers:
            moved = [worker for worker, each in told.items() if result_of(each) == "applied"]
            back = await self._told(moved, "/config?force=1&kept=1", self.running.text, {})
            for worker in back:  # it has counted the change and the way back
                self._lost(worker)
            message = "a worker could not take over what it had tried; all went back"
            return failed[0] if failed else _answer(503, "nothing", message)
        applied = next((each for each in answers if result_of(each) == "applied"), answers[0])
        numbers = {worker: _number(each) for worker, each in told.items()}
        self._now(loaded, max(self.version, *numbers.values()))
        for worker, number in numbers.items():  # who had it already, of a secret read sooner, has counted no version
            if number != self.version:
                self._lost(worker)
        self._tell(applied, bad=False)
        return applied

    def _now(self, loaded: Loaded, version: int) -> None:
        """All workers have this; whoever starts begins with it."""
        self.running = loaded
        self.numbered(version)

    async def _told(
        self, workers: Sequence[Worker], path: str, text: bytes | None, match: dict[str, str]
    ) -> dict[Worker, Answer]:
        """What those say who answer; the others are lost. The eldest is asked whether If-Match holds: it knows all
        versions."""
        key = self.running.config.admin.key
        headers = {} if key is None else {"Authorization": f"Bearer {key.reveal()}"}
        method = "POST" if text is None else "PUT"
        told: dict[Worker, Answer] = {}

        async def ask(worker: Worker, more: dict[str, str]) -> None:
            try:
                told[worker] = await worker.ask(method, path, text, headers | more)
            except LOST:
                self._lost(worker)

        await asyncio.gather(*(ask(worker, match if not at else {}) for at, worker in enumerate(workers)))
        return {worker: told[worker] for worker in workers if worker in told}

    def _tell(self, answer: Answer, *, bad: bool) -> None:
        """One line to the operator; the same rejection once."""
        message = message_of(answer)
        if bad and self._rejected == message:
            return
        self._rejected = message if bad else ""
        self._say(message, bad)


def result_of(answer: Answer) -> str:
    """What came of it, as a worker calls it."""
    return str(_json(answer).get("result", ""))


def message_of(answer: Answer) -> str:
    """What a worker says of it."""
    return str(_json(answer).get("message", ""))


def _number(answer: Answer) -> int:
    """Of the version that is in force there."""
    told = _json(answer).get("version")
    return told if isinstance(told, int) else 0


def _json(answer: Answer) -> dict[str, object]:
    try:
        found = json.loads(answer.body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _answer(status: int, result: str, message: str) -> Answer:
    body = {"result": result, "message": message, "changes": [], "problems": [], "needs_restart": []}
    return Answer(status, {"Content-Type": "application/json"}, json.dumps(body).encode())

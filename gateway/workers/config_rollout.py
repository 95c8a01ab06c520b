"""Changes of the configuration that either all workers apply or none.

Each worker does a dry run first. If all of them accept the change, each worker applies it. If one
fails then, the others roll back. A version has the same number in all workers; a worker with
another number is replaced.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from time import time
from urllib.parse import urlencode

import msgspec

from gateway.config import ConfigError, LoadedConfig, load_text, load_with_warnings
from gateway.config.file_reader import read_config_file
from gateway.reload.history import VersionHistory, create_version
from gateway.reload.reloader import DEFAULT_OPTIONS, PUT_NAME, ChangeOptions, ReportLine, do_nothing
from gateway.workers.worker_process import REQUEST_ERRORS, Worker, WorkerResponse

SUCCESS_RESULTS = ("applied", "unchanged")
DRY_RUN_RESULTS = ("dry_run", "unchanged")


class ConfigRollout:
    """Applies one change of the configuration at a time, to all worker processes or to none.

    running  the current configuration, with which new workers start
    on_lost  function that replaces a worker; called with each worker whose configuration may differ
             from that of the others
    """

    def __init__(
        self,
        loaded: LoadedConfig,
        file: Path | None,
        env: Mapping[str, str],
        workers: Callable[[], Sequence[Worker]],
        report_line: ReportLine,
        on_lost: Callable[[Worker], None],
    ) -> None:
        self.running = loaded
        self.file = file
        self._env = env
        self._workers = workers
        self._report_line = report_line
        self._on_lost = on_lost
        self._last_rejection = ""  # the message of the last change, if it was rejected
        self._missing: tuple[Path, ...] = ()
        self._file_text: bytes | None = loaded.text  # text last applied; None if it was rejected
        folder = loaded.config.reload.state_dir
        self._versions = VersionHistory(None if folder is None else Path(folder))
        self.lock = asyncio.Lock()
        self.on_applied: Callable[[str], Awaitable[None]] = do_nothing

    @property
    def version(self) -> int:
        versions = self._versions.all()
        return versions[-1].number if versions else 1

    def set_version_number(self, version: int) -> None:
        """Record the number of the current configuration version, as the oldest worker reports it.

        That worker writes the version files if there is a state folder.
        """
        self._versions.add(create_version(version, time(), "", self.running, ()))

    @property
    def paths(self) -> tuple[Path, ...]:
        """Return every file on which the current or the last rejected configuration depends."""
        own = () if self.file is None else (self.file,)
        return tuple(dict.fromkeys((*own, *self.running.references, *self._missing)))

    async def reload_changed_files(self) -> None:
        """Reload the configuration after a watched file has changed.

        If the configuration file has changed, it is applied. If only files that it refers to have
        changed, the current configuration is applied again.
        """
        file = self.file
        if file is not None:
            await self._change(
                "/config/reload",
                None,
                {},
                lambda: load_with_warnings(file, self._env),
                is_due=lambda: self._has_file_changed(file),
            )
        if self.running.text != self._file_text and await asyncio.to_thread(
            self._has_new_references
        ):
            await self._change(
                "/config",
                self.running.text,
                {},
                lambda: self._load_sent(self.running.text),
                ChangeOptions(was_in_force=True),
            )

    def _has_file_changed(self, file: Path) -> bool:
        # Return whether to reload the file.
        #
        # True if the file is in force, or differs from when it was last applied.
        try:
            return self.running.text == self._file_text or read_config_file(file) != self._file_text
        except ConfigError:
            return True

    def _has_new_references(self) -> bool:
        try:
            return self._load_running_again().digest != self.running.digest
        except ConfigError:
            return True

    def _load_running_again(self) -> LoadedConfig:
        return load_text(self.running.text, self.running.file, self._env)

    async def reload(self, options: ChangeOptions = DEFAULT_OPTIONS) -> WorkerResponse:
        """Read the configuration file and apply it to all workers.

        Returns the response for the client.
        """
        file = self.file
        if file is None:
            return _answer(
                409,
                "nothing",
                "there is no configuration file: the engines were given on the command line",
            )

        return await self._change(
            "/config/reload", None, {}, lambda: load_with_warnings(file, self._env), options
        )

    async def put(
        self, text: bytes, headers: Mapping[str, str], options: ChangeOptions = DEFAULT_OPTIONS
    ) -> WorkerResponse:
        """Apply a configuration text from a client to all workers.

        If there is an `If-Match` header, it must match the version of the oldest worker.
        """
        match = {"If-Match": headers["If-Match"]} if "If-Match" in headers else {}
        return await self._change("/config", text, match, lambda: self._load_sent(text), options)

    def _load_sent(self, text: bytes) -> LoadedConfig:
        # Load a text under the file name that workers give it; the name is part of a version.
        name = str((self.file.parent if self.file is not None else Path()) / PUT_NAME)
        return load_text(text, name, self._env)

    async def rollback(
        self, number: int | None, options: ChangeOptions = DEFAULT_OPTIONS
    ) -> WorkerResponse:
        """Apply an older version to all workers: `number`, or by default the previous version."""
        older = [version for version in self._versions.all() if version.number < self.version]
        target = (
            self._versions.find(number) if number is not None else (older[-1] if older else None)
        )
        if target is None:
            message = (
                f"version {number} is not available"
                if number is not None
                else "no older version is available"
            )
            return _answer(409, "nothing", message)
        if target.text is None:
            message = (
                f"version {target.number} cannot be restored: "
                "its text contains a secret and was not kept"
            )
            return _answer(409, "nothing", message)
        text = target.text.encode()
        options = msgspec.structs.replace(options, was_in_force=True)
        return await self._change(
            "/config", text, {}, lambda: self._load_sent(text), options, trigger="rollback"
        )

    async def _change(
        self,
        path: str,
        text: bytes | None,
        match: dict[str, str],
        read: Callable[[], LoadedConfig],
        options: ChangeOptions = DEFAULT_OPTIONS,
        trigger: str = "change",
        is_due: Callable[[], bool] = lambda: True,
    ) -> WorkerResponse:
        # Try a change in all workers (dry run), then apply it; `text` is None for the file's text.
        #
        # The workers report problems of the text, because they load it too. `is_due` is asked in a
        # thread, after the changes that came before: one of them may have replaced the file's text.
        async with self.lock:
            if not await asyncio.to_thread(is_due):
                return _answer(409, "nothing", "the file has not changed")
            missing: tuple[Path, ...] = ()
            loaded: LoadedConfig | None = None
            try:
                loaded = await asyncio.to_thread(read)
            except ConfigError as error:
                missing = error.references
            before = self.version
            response = await self._try_and_apply(path, text, match, loaded, options)
            if self.version != before:
                await self.on_applied(trigger)
            if text is None and not options.dry_run:
                is_applied = loaded is not None and response_result(response) in SUCCESS_RESULTS
                self._file_text = loaded.text if loaded is not None and is_applied else None
                self._missing = missing
            return response

    async def _try_and_apply(
        self,
        path: str,
        text: bytes | None,
        match: dict[str, str],
        loaded: LoadedConfig | None,
        options: ChangeOptions,
    ) -> WorkerResponse:
        workers = self._workers()
        if not workers:
            return _answer(503, "nothing", "no worker is ready")
        by_worker = await self._send_to(workers, _dry_run_path(path, options), text, match)
        if len(by_worker) < len(workers):
            return _answer(
                503,
                "nothing",
                "a worker did not respond and is being replaced; nothing was changed",
            )
        responses = list(by_worker.values())
        refused = next(
            (
                response
                for response in responses
                if response_result(response) not in DRY_RUN_RESULTS
            ),
            None,
        )
        if refused is not None and not options.dry_run:
            self._report(refused, is_error=True)
        if refused is not None or options.dry_run or loaded is None:
            return refused or responses[0]
        if (
            all(response_result(response) == "unchanged" for response in responses)
            and not self._last_rejection
        ):
            self._set_running(loaded, self.version)
            return responses[0]
        return await self._apply(workers, path, text, loaded, options)

    async def _apply(
        self,
        workers: Sequence[Worker],
        path: str,
        text: bytes | None,
        loaded: LoadedConfig,
        options: ChangeOptions,
    ) -> WorkerResponse:
        query = {"force": "1"}
        if options.was_in_force:
            query["was_in_force"] = "1"
        if options.trigger:
            query |= {"trigger": options.trigger, "reason": options.reason}
        # The dry run has checked already whether the endpoints can be reached.
        by_worker = await self._send_to(workers, f"{path}?{urlencode(query)}", text, {})
        responses = list(by_worker.values())
        failed = [
            response for response in responses if response_result(response) not in SUCCESS_RESULTS
        ]
        if failed or not responses:
            await self._roll_back(by_worker)
            message = "a worker could not apply what its dry run had accepted; all rolled back"
            return failed[0] if failed else _answer(503, "nothing", message)
        applied = next(
            (response for response in responses if response_result(response) == "applied"),
            responses[0],
        )
        numbers = {worker: _number(response) for worker, response in by_worker.items()}
        self._set_running(loaded, max(self.version, *numbers.values()))
        # All workers must have the same version number. A worker that read a changed secret file
        # earlier has applied nothing now, so its number is lower, and it is replaced.
        for worker, number in numbers.items():
            if number != self.version:
                self._on_lost(worker)
        self._report(applied, is_error=False)
        return applied

    async def _roll_back(self, by_worker: Mapping[Worker, WorkerResponse]) -> None:
        # Return the workers that have applied a change to the running configuration.
        applied_by = [
            worker
            for worker, response in by_worker.items()
            if response_result(response) == "applied"
        ]
        rolled_back = await self._send_to(
            applied_by, "/config?force=1&was_in_force=1", self.running.text, {}
        )
        # The version numbers of these workers are ahead of the others' by two, so replace them.
        for worker in rolled_back:
            self._on_lost(worker)

    def _set_running(self, loaded: LoadedConfig, version: int) -> None:
        # Record that all workers run this configuration; new workers start with it.
        self.running = loaded
        self.set_version_number(version)

    async def _send_to(
        self, workers: Sequence[Worker], path: str, text: bytes | None, match: dict[str, str]
    ) -> dict[Worker, WorkerResponse]:
        # Send a change to the workers; return the responses by worker.
        #
        # Workers that do not respond are left out and reported as lost. Only the oldest worker
        # checks If-Match, because it knows every version.
        key = self.running.config.admin.key
        headers = {} if key is None else {"Authorization": f"Bearer {key.reveal()}"}
        method = "POST" if text is None else "PUT"
        by_worker: dict[Worker, WorkerResponse] = {}

        async def send_to(worker: Worker, extra_headers: dict[str, str]) -> None:
            try:
                by_worker[worker] = await worker.request(
                    method, path, text, headers | extra_headers
                )
            except REQUEST_ERRORS:
                self._on_lost(worker)

        await asyncio.gather(
            *(send_to(worker, match if not index else {}) for index, worker in enumerate(workers))
        )
        return {worker: by_worker[worker] for worker in workers if worker in by_worker}

    def _report(self, response: WorkerResponse, *, is_error: bool) -> None:
        # Report the result to the operator in one line; a repeated rejection only once.
        message = response_message(response)
        if is_error and self._last_rejection == message:
            return
        self._last_rejection = message if is_error else ""
        self._report_line(message, is_error)


def response_result(response: WorkerResponse) -> str:
    """Return the member `result` of a worker's response, such as "applied"; "" if it has none."""
    return str(_json(response).get("result", ""))


def response_message(response: WorkerResponse) -> str:
    """Return the member `message` of a worker's response; "" if it has none."""
    return str(_json(response).get("message", ""))


def _number(response: WorkerResponse) -> int:
    # Return the number of the version that the worker runs, or 0 if it reports none.
    number = _json(response).get("version")
    return number if isinstance(number, int) else 0


def _json(response: WorkerResponse) -> dict[str, object]:
    try:
        value = json.loads(response.body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _answer(status: int, result: str, message: str) -> WorkerResponse:
    body = {
        "result": result,
        "message": message,
        "changes": [],
        "problems": [],
        "needs_restart": [],
    }
    return WorkerResponse(status, {"Content-Type": "application/json"}, json.dumps(body).encode())


def _dry_run_path(path: str, options: ChangeOptions) -> str:
    query = "dry_run=1" if options.dry_run else "dry_run=1&record_rejection=1"
    if options.force:
        query += "&force=1"
    if options.was_in_force:
        query += "&was_in_force=1"
    return f"{path}?{query}"

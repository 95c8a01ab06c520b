"""The order of a configuration change: read, check, test, apply or reject, record, tell operators.

All changes go through this module, one at a time, whatever triggers them. It contains the order of
the steps, the history and the messages to operators. The triggers are in file_watcher.py,
admin/config_pages.py and app.py. dry_run_and_swap.py applies a configuration.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from time import perf_counter, time

import msgspec

from gateway.config import Config, ConfigError, LoadedConfig, Problem, load_text, load_with_warnings
from gateway.config.diff import ConfigChange, diff
from gateway.config.file_reader import read_config_file, read_file
from gateway.config.uploaded_references import unresolvable
from gateway.config.yaml_source import parse_yaml
from gateway.metrics.catalogue import Metrics
from gateway.reload import history as versions
from gateway.reload.dry_run_and_swap import ConfigRejectedError, Swap
from gateway.reload.history import Version, VersionHistory
from gateway.util.work_in_turns import run_in_thread

log = logging.getLogger("penstock")

LOGS = tuple(
    f"observability.{key}"
    for key in ("access_log", "access_flush", "access_blocks", "access_rotate", "log")
)
BATCHES = ("batch.dir", "batch.s3", "batch.lease")
BOUND_AT_START = ("listeners", "prefix", *LOGS, *BATCHES, "reload.state_dir", "shared", "workers")
"""Settings that are read only when the process starts.

A change of them is accepted, and takes effect at the next start.
"""

APPLIED_AT_ONCE = ("listeners.api.tls.", "listeners.admin.tls.")
"""Settings within those of BOUND_AT_START that apply to new connections immediately."""

FILE_TRIGGERS = frozenset({"file", "signal", "command"})
"""Triggers that load the text of the configuration file."""

PUT_NAME = "PUT config"
"""Name of a configuration text received by PUT, shown in problems in place of a file name."""

ReportLine = Callable[[str, bool], None]
"""A function that reports a line to the operator; the second argument is True for an error."""


class ChangeOptions(msgspec.Struct, frozen=True):
    """The options of one configuration change.

    dry_run            whether to check the change without applying it
    records_rejection  whether a dry run checks that endpoints can be reached, and records a
                       rejection as an error. A supervisor sets it for its dry run in each worker
    force              whether to apply the change although no endpoint of some pool can be reached,
                       or no endpoint lists a model that is served now
    was_in_force       whether the text was in use before; if so, none of its references is refused
    trigger            what caused a change that a supervisor makes; empty: the caller names it
    reason             why the change is made, for the history; empty if its author gave no reason
    """

    dry_run: bool = False
    records_rejection: bool = False
    force: bool = False
    was_in_force: bool = False
    trigger: str = ""
    reason: str = ""


DEFAULT_OPTIONS = ChangeOptions()
"""The default options: a change that makes a pool unreachable is rejected."""


class ReloadOutcome(msgspec.Struct, frozen=True):
    """The outcome of one attempt to change the configuration.

    result         applied, unchanged, rejected, dry_run, conflict (the If-Match header does not
                   match), or nothing (no such version, or no file)
    needs_restart  changed settings that take effect at the next start
    affected       number of requests in progress at endpoints or in pools that the change removes
    took_s         duration in seconds
    """

    result: str
    version: Version
    message: str
    changes: tuple[ConfigChange, ...] = ()
    problems: tuple[Problem, ...] = ()
    needs_restart: tuple[str, ...] = ()
    affected: int = 0
    took_s: float = 0.0


class Rejection(msgspec.Struct, frozen=True):
    """The last attempt to change the configuration, if it was rejected; `at` is a Unix time."""

    at: float
    trigger: str
    problems: tuple[Problem, ...]


async def do_nothing(_trigger: str) -> None:
    """Do nothing after a change. Gateways without auto-rollback use this as `on_applied`."""


class Reloader:
    """Makes all changes of the configuration, and keeps the current one and the history.

    running        the loaded configuration of the current snapshot
    needs_restart  changed settings that take effect only at the next start
    last_error     why the last attempt failed; None if it succeeded
    """

    def __init__(
        self,
        loaded: LoadedConfig,
        file: Path | None,
        swap: Swap,
        metrics: Metrics,
        env: Mapping[str, str],
        report_line: ReportLine,
        versions: VersionHistory | None = None,
    ) -> None:
        """Create the reloader of a running gateway.

        file         the file that a reload reads; None if the engines were given on the command
                     line
        report_line  function that reports a line to the operator; its second argument is True for
                     an error
        versions     the history; by default it is read from `reload.state_dir`
        """
        self.running = loaded
        self.needs_restart: tuple[str, ...] = ()
        self.last_error: Rejection | None = None
        self.on_applied: Callable[[str], Awaitable[None]] = do_nothing
        self._started = loaded
        self._file = file
        self._seen, self._seen_text = loaded.digest, loaded.text
        self._missing: tuple[Path, ...] = ()
        self._swap = swap
        self._env = env
        self._report = report_line
        self._lock = asyncio.Lock()
        self._metrics = metrics
        for result in ("applied", "unchanged", "rejected", "rolled_back"):
            # Create the series, so that queries find them before the first event.
            metrics.config_reload_total.labels(result)
        folder = loaded.config.reload.state_dir
        self.history = versions or VersionHistory(Path(folder) if folder is not None else None)
        self.version = self._first(loaded)

    def _first(self, loaded: LoadedConfig) -> Version:
        # Return the version in force at the start: the newest stored one if equal, else a new one.
        #
        # In a worker it must also have the number that the other workers use. The newest stored
        # version may have another one if writing failed, or if only this worker applied it.
        newest, current = next(reversed(self.history.all()), None), self.history.current
        number = current or self.history.next_number
        first = versions.create_version(number, time(), "start", loaded, ())
        is_same = newest is not None and (newest.hash, newest.file) == (first.hash, first.file)
        if newest is not None and is_same and current in (None, newest.number):
            first = msgspec.structs.replace(newest, text=first.text)
        else:
            self._write(first, has_secret=loaded.has_secret_in_text)
        self.history.add(first)
        self._update_version_metrics(first)
        self._metrics.config_last_reload_successful.set(1)
        return first

    @property
    def paths(self) -> tuple[Path, ...]:
        """Return the paths of the files whose change may change the configuration.

        They are the configuration file, the files that it refers to, and files that were missing at
        the last rejected attempt.
        """
        own = () if self._file is None else (self._file,)
        return tuple(dict.fromkeys((*own, *self.running.references, *self._missing)))

    def file_differs(self) -> bool:
        """Return whether the text of the configuration file differs from the current configuration.

        They differ after a rollback, after a PUT, or after an edit while watching is off. Call this
        in a thread.
        """
        if self._file is None:
            return False
        try:
            return read_config_file(self._file) != self.running.text
        except ConfigError:
            return True

    # Triggers

    async def reload(self, trigger: str, options: ChangeOptions = DEFAULT_OPTIONS) -> ReloadOutcome:
        """Read the configuration file again, apply it, and return the outcome."""
        file = self._file
        if file is None:
            return self._nothing_to_do(
                "there is no configuration file: the engines were given on the command line"
            )
        return await self._attempt(lambda: load_with_warnings(file, self._env), trigger, options)

    async def reload_changed_files(self) -> ReloadOutcome | None:
        """Reload the configuration after one of the files in `paths` has changed.

        Returns None if the configuration is the same as before.
        """
        file = self._file
        if file is not None:
            outcome = await self._attempt(
                lambda: load_with_warnings(file, self._env), "file", only_if_changed=True
            )
            if outcome.result != "unchanged":
                return outcome
        if self.running.digest == self._seen:
            return None  # the file's text is in use already, and was just examined
        return await self._attempt(self._reread_running, "secret", only_if_changed=True)

    def _reread_running(self) -> LoadedConfig:
        return load_text(self.running.text, self.running.file, self._env)

    async def put(
        self,
        text: bytes,
        trigger: str,
        *,
        if_match: str | None = None,
        options: ChangeOptions = DEFAULT_OPTIONS,
    ) -> ReloadOutcome:
        """Apply a configuration text from an admin request, and return the outcome.

        text      the YAML text. Its relative paths start at the folder of the configuration file;
                  config/uploaded_references.py decides which references are refused
        trigger   what caused the change, for the history
        if_match  ETag that the current version must have; otherwise the result is "conflict"
        options   the options of the change
        """
        name = str((self._file.parent if self._file is not None else Path()) / PUT_NAME)

        def read() -> LoadedConfig:
            if options.was_in_force:
                return load_text(text, name, self._env)
            known = (self.running.text, self._started.text)
            refused = unresolvable(
                text, name, known, with_key=self.running.config.admin.key is not None
            )
            return load_text(text, name, self._env, refused)

        return await self._attempt(read, trigger, options, if_match=if_match)

    async def rollback(
        self,
        number: int | None,
        trigger: str = "rollback",
        *,
        if_match: str | None = None,
        options: ChangeOptions = DEFAULT_OPTIONS,
    ) -> ReloadOutcome:
        """Apply the configuration version `number` again; by default the previous one.

        trigger   what caused the change, for the history
        if_match  ETag that the current version must have; otherwise the result is "conflict"
        """
        older = [version for version in self.history.all() if version.number < self.version.number]
        wanted = self.history.find(number) if number is not None else (older[-1] if older else None)
        if wanted is None:
            return self._nothing_to_do(
                f"no version {number} is kept"
                if number is not None
                else "there is no earlier version to return to"
            )
        text = wanted.text
        if text is None:
            return self._nothing_to_do(
                f"the text of version {wanted.number} was not kept, because it contains a secret"
            )
        load = partial(load_text, text.encode(), wanted.file, self._env)
        return await self._attempt(load, trigger, options, if_match=if_match)

    # The transaction

    async def _attempt(
        self,
        read: Callable[[], LoadedConfig],
        trigger: str,
        options: ChangeOptions = DEFAULT_OPTIONS,
        *,
        if_match: str | None = None,
        only_if_changed: bool = False,
    ) -> ReloadOutcome:
        # Load and apply a configuration; with `only_if_changed`, ignore an unchanged one.
        async with self._lock:
            if if_match is not None and not _matches(if_match, self.version.etag):
                message = f"the current configuration is {self.version.etag}, not {if_match}"
                return ReloadOutcome("conflict", self.version, message)
            began = perf_counter()
            try:
                loaded = await run_in_thread(read)
                if trigger == "file" and self._superseded(loaded):
                    self._seen = loaded.digest
                    return ReloadOutcome("unchanged", self.version, "")
                is_known = loaded.digest in (self._seen, self.running.digest)
                is_old_news = is_known and self._is_unchanged_failure(trigger)
                if trigger in FILE_TRIGGERS and not options.dry_run:
                    self._seen, self._seen_text = loaded.digest, loaded.text
                if only_if_changed and is_old_news:
                    return ReloadOutcome("unchanged", self.version, "")
                if loaded.digest == self.running.digest:
                    return self._unchanged(loaded, dry_run=options.dry_run)
                return await self._apply(loaded, trigger, began, options)
            except ConfigError as error:
                last = self.last_error
                if only_if_changed and last is not None and last.problems == error.problems:
                    return ReloadOutcome("unchanged", self.version, "")
                is_recorded = options.records_rejection or not options.dry_run
                return self._reject(error, trigger, is_recorded=is_recorded)

    def _superseded(self, loaded: LoadedConfig) -> bool:
        # Return whether a PUT or a rollback has replaced the file's configuration, and the file was
        # not edited since.
        #
        # In that case only a secret has changed to which the file refers, and the configuration in
        # use stays.
        was_rejected = self.last_error is not None and self.last_error.trigger in FILE_TRIGGERS
        return (
            self.running.digest != self._seen
            and loaded.text == self._seen_text
            and not was_rejected
        )

    def _is_unchanged_failure(self, trigger: str) -> bool:
        # Return whether a successful load of an unchanged text would clear no stored error.
        #
        # An error in the file is kept until the file is valid, even if the secrets of the
        # configuration in use have changed.
        return self.last_error is None or (
            trigger == "secret" and self.last_error.trigger != trigger
        )

    async def _apply(
        self, loaded: LoadedConfig, trigger: str, began: float, options: ChangeOptions
    ) -> ReloadOutcome:
        changed = await run_in_thread(partial(diff, self.running, loaded))
        bound = _bound(await run_in_thread(partial(diff, self._started, loaded)))
        is_checked = not options.force and (options.records_rejection or not options.dry_run)
        try:
            if is_checked:
                await self._swap.check_reachable(loaded.config)
            affected = await self._swap_in(loaded.config, options, is_checked=is_checked)
        except ConfigRejectedError as problem:
            args = loaded.text, loaded.file, self._env, read_file
            source = await run_in_thread(partial(parse_yaml, *args))
            raise ConfigError([source.problem_at(problem.path, str(problem))]) from problem
        if affected is None:
            message = f"would be applied: {_summary(changed)}"
            return ReloadOutcome("dry_run", self.version, message, changed, (), bound)
        version = versions.create_version(
            self.history.next_number, time(), trigger, loaded, changed, options.reason
        )
        self.running, self.version, self.needs_restart = loaded, version, bound
        self.history.add(version)
        self._succeeded("applied")
        self._update_version_metrics(version)
        took_s = perf_counter() - began
        outcome = ReloadOutcome("applied", version, "", changed, (), bound, affected, took_s)
        outcome = msgspec.structs.replace(outcome, message=_applied_message(outcome))
        self._report(outcome.message, False)
        await asyncio.to_thread(self._write, version, has_secret=loaded.has_secret_in_text)
        await self.on_applied(trigger)
        return outcome

    async def _swap_in(
        self, config: Config, options: ChangeOptions, *, is_checked: bool
    ) -> int | None:
        # Plan a configuration and apply it; return the number of affected requests.
        #
        # Return None if it is only a dry run. Raises ConfigRejectedError.
        async with self._swap.exclusive():
            plan = await self._swap.plan(config)
            if is_checked:
                self._swap.check_listed(plan)
            if options.dry_run:
                return None
            await self._swap.prepare(plan)
            began = perf_counter()
            affected = self._swap.apply(plan)
            self._metrics.config_swap_seconds.observe(perf_counter() - began)
            return affected

    def _write(self, version: Version, *, has_secret: bool) -> None:
        try:
            self.history.write(version, has_secret=has_secret)
        except OSError as error:
            log.error(
                "configuration version %d could not be written to reload.state_dir: %s",
                version.number,
                error,
            )

    # Outcomes

    def _unchanged(self, loaded: LoadedConfig, *, dry_run: bool) -> ReloadOutcome:
        message = f"{_short(loaded.file)} is already in force: v{self.version.number}"
        if not dry_run:
            self._succeeded("unchanged")
            self._report(message, False)
        return ReloadOutcome("unchanged", self.version, message)

    def _reject(self, error: ConfigError, trigger: str, *, is_recorded: bool) -> ReloadOutcome:
        first, others = error.problems[0], len(error.problems) - 1
        hint = f" ({others} more: GET /config)" if others else ""
        problem = f"{_short(first.file)}{str(first)[len(first.file) :]}{hint}"
        end = "" if problem.endswith("?") else "."
        message = f"rejected {problem}{end} Still serving v{self.version.number}."
        if is_recorded:
            self.last_error = Rejection(time(), trigger, error.problems)
            self._missing = error.references
            self._metrics.config_reload_total.labels("rejected").inc()
            self._metrics.config_last_reload_successful.set(0)
            self._report(message, True)
        return ReloadOutcome("rejected", self.version, message, (), error.problems)

    def _nothing_to_do(self, message: str) -> ReloadOutcome:
        return ReloadOutcome("nothing", self.version, message)

    def _succeeded(self, result: str) -> None:
        self.last_error, self._missing = None, ()
        self._metrics.config_reload_total.labels(result).inc()
        self._metrics.config_last_reload_successful.set(1)

    def _update_version_metrics(self, version: Version) -> None:
        self._metrics.config_version_info.clear()
        self._metrics.config_version_info.labels(str(version.number), version.hash).set(1)
        self._metrics.config_applied_timestamp_seconds.set(version.at)


def _matches(if_match: str, etag: str) -> bool:
    return any(tag.strip() in ("*", etag) for tag in if_match.split(","))


def _bound(changed: tuple[ConfigChange, ...]) -> tuple[str, ...]:
    return tuple(change.path for change in changed if _is_bound(change.path))


def _is_bound(path: str) -> bool:
    if path.startswith(APPLIED_AT_ONCE):
        return False
    return any(f"{path}.".startswith(f"{bound}.") for bound in BOUND_AT_START)


def _applied_message(outcome: ReloadOutcome) -> str:
    restart = ""
    if outcome.needs_restart:
        restart = f"; needs a restart: {', '.join(outcome.needs_restart)}"
    requests = "request" if outcome.affected == 1 else "requests"
    finish = " (they finish where they are)" if outcome.affected else ""
    return (
        f"reloaded {_short(outcome.version.file)} v{outcome.version.number} "
        f"({_summary(outcome.changes)}) "
        f"in {outcome.took_s * 1000:.0f} ms, "
        f"{outcome.affected} {requests} affected{finish}{restart}"
    )


def _summary(changed: tuple[ConfigChange, ...]) -> str:
    count, paths = len(changed), [change.path for change in changed[:3]]
    if not count:
        return "no setting changed"
    others = f" and {count - 3} more" if count > 3 else ""
    return f"{count} change{'s' if count > 1 else ''}: {', '.join(paths)}{others}"


def _short(file: str) -> str:
    return Path(file).name

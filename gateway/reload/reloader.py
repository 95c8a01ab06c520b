"""The transaction: a text is read, parsed, built and tried, and then in force; or the last good one stays.

One way for all triggers, one at a time. Lives here: the order, what is kept and what is told of it. Not here: when it
is triggered (follow.py, pages.py, app.py) and what a swap does (swap.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from time import perf_counter, time

import msgspec

from gateway.config import ConfigError, Loaded, Problem, examine, examine_text
from gateway.config.compare import Change, changes
from gateway.config.references import unresolvable
from gateway.config.source import parse, raw_bytes
from gateway.metrics import Metrics
from gateway.reload import versions
from gateway.reload.swap import CannotServe, Swap
from gateway.reload.versions import Version, Versions

log = logging.getLogger("penstock")

LOGS = tuple(f"observability.{key}" for key in ("access_log", "access_flush", "access_blocks", "access_rotate", "log"))
AT_START = ("listeners", "prefix", *LOGS, "reload.state_dir", "shared", "workers")
"""What is bound once, at the start. A change of it is taken over, and comes into effect with the next start."""

AT_ONCE = ("listeners.api.tls.", "listeners.admin.tls.")
"""Below what is bound at the start: what new connections use at once."""

FROM_FILE = frozenset({"file", "signal", "command"})
"""Triggers by which the file's own text is taken over."""

SENT = "PUT config"
"""How a text is called that was sent: problems show it where a file's name would stand."""

Say = Callable[[str, bool], None]
"""Tells an operator one line; True when it is bad news."""


class ChangeOptions(msgspec.Struct, frozen=True):
    """How a change is made.

    dry_run  check it and change nothing
    kept     the text was in force before: its references may be resolved wherever they are
    noted    a dry run whose rejection counts like that of a real one: a supervisor has all its
             workers try a change before any of them makes it
    force    also if none of a pool's endpoints can be reached
    """

    dry_run: bool = False
    noted: bool = False
    force: bool = False
    kept: bool = False


CHANGE = ChangeOptions()
"""A real change that is refused when a pool cannot be reached."""


class Outcome(msgspec.Struct, frozen=True):
    """What came of one attempt.

    result         applied, unchanged, rejected, conflict (If-Match), nothing (no such version, or no file), dry_run
    needs_restart  what differs from what was bound at the start
    affected       requests at endpoints or in pools that leave
    """

    result: str
    version: Version
    message: str
    changes: tuple[Change, ...] = ()
    problems: tuple[Problem, ...] = ()
    needs_restart: tuple[str, ...] = ()
    affected: int = 0
    took_s: float = 0.0


class Rejection(msgspec.Struct, frozen=True):
    """The last attempt, when it failed."""

    at: float
    trigger: str
    problems: tuple[Problem, ...]


async def do_nothing(_trigger: str) -> None:
    """After a change, where no trial judges it."""


class Reloader:
    """Owner of what is in force and of its history. `running` is the text behind the snapshot, `last_error` why the
    last attempt failed, if it did."""

    def __init__(
        self,
        loaded: Loaded,
        file: Path | None,
        swap: Swap,
        metrics: Metrics,
        env: Mapping[str, str],
        say: Say,
        kept: Versions | None = None,
    ) -> None:
        """`file` is what a reload reads; None: the engines were given on the command line. `kept` in place of the
        versions in the configuration's folder."""
        self.running = loaded
        self.last_error: Rejection | None = None
        self.on_applied: Callable[[str], Awaitable[None]] = do_nothing
        self._started = loaded
        self._file = file
        self._seen, self._seen_text = loaded.digest, loaded.text
        self._missing: tuple[Path, ...] = ()
        self._swap = swap
        self._env = env
        self._say = say
        self._one_at_a_time = asyncio.Lock()
        self._metrics = metrics
        for result in ("applied", "unchanged", "rejected", "rolled_back"):
            metrics.config_reload_total.labels(result)  # so that a query finds them before anything has happened
        folder = loaded.config.reload.state_dir
        self.versions = kept or Versions(Path(folder) if folder is not None else None)
        self.version = self._first(loaded)

    def _first(self, loaded: Loaded) -> Version:
        """What is in force at the start: the newest version kept, if it says the same and has the number that was told,
        if one was: writing may have failed, or a worker may have counted what the others never had."""
        newest, told = next(reversed(self.versions.all()), None), self.versions.told
        fresh = versions.made(told or self.versions.next_number, time(), "start", loaded, ())
        same = newest is not None and (newest.hash, newest.file) == (fresh.hash, fresh.file)
        if newest is not None and same and told in (None, newest.number):
            fresh = msgspec.structs.replace(newest, text=fresh.text)
        else:
            self._keep(fresh, in_clear=loaded.in_clear)
        self.versions.add(fresh)
        self._show(fresh)
        self._metrics.config_last_reload_successful.set(1)
        return fresh

    @property
    def paths(self) -> tuple[Path, ...]:
        """Every file that what is in force, or what was rejected last, is made of."""
        own = () if self._file is None else (self._file,)
        return tuple(dict.fromkeys((*own, *self.running.references, *self._missing)))

    @property
    def needs_restart(self) -> tuple[str, ...]:
        """What the configuration in force says and the running process cannot do before its next start."""
        return _bound(changes(self._started, self.running))

    def file_differs(self) -> bool:
        """Whether the file says something else than what is in force: after a rollback, a PUT or an edit that is not
        followed. Reads the file, so call it in a thread."""
        if self._file is None:
            return False
        try:
            return raw_bytes(self._file) != self.running.text
        except ConfigError:
            return True

    # Triggers

    async def reload(self, trigger: str, options: ChangeOptions = CHANGE) -> Outcome:
        """Take over the file as it is now."""
        file = self._file
        if file is None:
            return self._nothing("there is no file: the engines were given on the command line")
        return await self._attempt(lambda: examine(file, self._env), trigger, options)

    async def changed(self) -> Outcome | None:
        """A file that matters was touched: take over what changed, if anything did."""
        file = self._file
        if file is not None:
            outcome = await self._attempt(lambda: examine(file, self._env), "file", news_only=True)
            if outcome.result != "unchanged":
                return outcome
        if self.running.digest == self._seen:
            return None  # it is the file's text that is in force, and it was looked at
        return await self._attempt(self._once_more, "secret", news_only=True)

    def _once_more(self) -> Loaded:
        """What is in force when its turn has come, with what its references lead to now."""
        return examine_text(self.running.text, self.running.file, self._env)

    async def put(
        self, text: bytes, trigger: str, *, if_match: str | None = None, options: ChangeOptions = CHANGE
    ) -> Outcome:
        """Take over a text that was sent. Its relative paths start from the file's folder.

        References that the running configuration does not have at such a place are refused (config/references.py).
        """
        name = str((self._file.parent if self._file is not None else Path()) / SENT)

        def read() -> Loaded:
            if options.kept:
                return examine_text(text, name, self._env)
            known = (self.running.text, self._started.text)
            refused = unresolvable(text, name, known, with_key=self.running.config.admin.key is not None)
            return examine_text(text, name, self._env, refused)

        return await self._attempt(read, trigger, options, if_match=if_match)

    async def rollback(
        self,
        number: int | None,
        trigger: str = "rollback",
        *,
        if_match: str | None = None,
        options: ChangeOptions = CHANGE,
    ) -> Outcome:
        """Take over an older version: that number, or the one before the one in force."""
        older = [each for each in self.versions.all() if each.number < self.version.number]
        wanted = self.versions.find(number) if number is not None else (older[-1] if older else None)
        if wanted is None:
            return self._nothing(f"no version {number} is kept" if number is not None else "no older version is kept")
        text = wanted.text
        if text is None:
            return self._nothing(f"the text of version {wanted.number} was not kept: a secret stands in it")
        return await self._attempt(
            lambda: examine_text(text.encode(), wanted.file, self._env), trigger, options, if_match=if_match
        )

    # The one way

    async def _attempt(
        self,
        read: Callable[[], Loaded],
        trigger: str,
        options: ChangeOptions = CHANGE,
        *,
        if_match: str | None = None,
        news_only: bool = False,
    ) -> Outcome:
        """`news_only`: somebody touched a file, which is worth a word only if it says something else now."""
        async with self._one_at_a_time:
            if if_match is not None and not _matches(if_match, self.version.etag):
                message = f"the configuration in force is {self.version.etag}, not {if_match}"
                return Outcome("conflict", self.version, message)
            began = perf_counter()
            try:
                loaded = await asyncio.to_thread(read)
                if trigger == "file" and self._superseded(loaded):
                    self._seen = loaded.digest
                    return Outcome("unchanged", self.version, "")
                old_news = self._mends_nothing(trigger) and loaded.digest in (self._seen, self.running.digest)
                if trigger in FROM_FILE and not options.dry_run:
                    self._seen, self._seen_text = loaded.digest, loaded.text
                if news_only and old_news:
                    return Outcome("unchanged", self.version, "")
                if loaded.digest == self.running.digest:
                    return self._unchanged(loaded, dry_run=options.dry_run)
                return await self._take_over(loaded, trigger, began, options)
            except ConfigError as error:
                if news_only and self.last_error is not None and self.last_error.problems == error.problems:
                    return Outcome("unchanged", self.version, "")
                return self._rejected(error, trigger, noted=options.noted or not options.dry_run)

    def _superseded(self, loaded: Loaded) -> bool:
        """Whether another text is in force than the file's, which nobody has edited since: a secret has moved."""
        refused = self.last_error is not None and self.last_error.trigger in FROM_FILE
        return self.running.digest != self._seen and loaded.text == self._seen_text and not refused

    def _mends_nothing(self, trigger: str) -> bool:
        """Whether there is no last error that an unchanged text would take back: a file's stays until the file is good,
        whatever becomes of the secrets of the text in force."""
        return self.last_error is None or (trigger == "secret" and self.last_error.trigger != trigger)

    async def _take_over(self, loaded: Loaded, trigger: str, began: float, options: ChangeOptions) -> Outcome:
        found = await asyncio.to_thread(changes, self.running, loaded)
        bound = _bound(await asyncio.to_thread(changes, self._started, loaded))
        try:
            if not options.force and (options.noted or not options.dry_run):
                await self._swap.check_reachable(loaded.config)
            plan = self._swap.plan(loaded.config)
        except CannotServe as problem:
            source = parse(loaded.text, loaded.file, self._env)
            raise ConfigError([source.problem(problem.path, str(problem))]) from problem
        if options.dry_run:
            return Outcome("dry_run", self.version, f"would be taken over: {_counted(found)}", found, (), bound)
        swap_began = perf_counter()
        affected = self._swap.carry_out(plan)
        self._metrics.config_swap_seconds.observe(perf_counter() - swap_began)
        version = versions.made(self.versions.next_number, time(), trigger, loaded, found)
        self.running, self.version = loaded, version
        self.versions.add(version)
        self._succeeded("applied")
        self._show(version)
        outcome = Outcome("applied", version, "", found, (), bound, affected, perf_counter() - began)
        outcome = msgspec.structs.replace(outcome, message=_line(outcome))
        self._say(outcome.message, False)
        await asyncio.to_thread(self._keep, version, in_clear=loaded.in_clear)
        await self.on_applied(trigger)
        return outcome

    def _keep(self, version: Version, *, in_clear: bool) -> None:
        try:
            self.versions.write(version, in_clear=in_clear)
        except OSError as error:
            log.error("version %d could not be written to reload.state_dir: %s", version.number, error)

    # What is told of it

    def _unchanged(self, loaded: Loaded, *, dry_run: bool) -> Outcome:
        message = f"{_short(loaded.file)} says what is in force already: v{self.version.number}"
        if not dry_run:
            self._succeeded("unchanged")
            self._say(message, False)
        return Outcome("unchanged", self.version, message)

    def _rejected(self, error: ConfigError, trigger: str, *, noted: bool) -> Outcome:
        first, more = error.problems[0], len(error.problems) - 1
        rest = f" ({more} more: GET /config)" if more else ""
        place = f"{_short(first.file)}{str(first)[len(first.file) :]}"
        end = "" if f"{place}{rest}".endswith("?") else "."
        message = f"rejected {place}{rest}{end} Still serving v{self.version.number}."
        if noted:
            self.last_error = Rejection(time(), trigger, error.problems)
            self._missing = error.references
            self._metrics.config_reload_total.labels("rejected").inc()
            self._metrics.config_last_reload_successful.set(0)
            self._say(message, True)
        return Outcome("rejected", self.version, message, (), error.problems)

    def _nothing(self, message: str) -> Outcome:
        return Outcome("nothing", self.version, message)

    def _succeeded(self, result: str) -> None:
        self.last_error, self._missing = None, ()
        self._metrics.config_reload_total.labels(result).inc()
        self._metrics.config_last_reload_successful.set(1)

    def _show(self, version: Version) -> None:
        self._metrics.config_version_info.clear()
        self._metrics.config_version_info.labels(str(version.number), version.hash).set(1)
        self._metrics.config_applied_timestamp_seconds.set(version.at)


def _matches(if_match: str, etag: str) -> bool:
    return any(each.strip() in ("*", etag) for each in if_match.split(","))


def _bound(found: tuple[Change, ...]) -> tuple[str, ...]:
    return tuple(each.path for each in found if _is_bound(each.path))


def _is_bound(path: str) -> bool:
    return not path.startswith(AT_ONCE) and any(f"{path}.".startswith(f"{bound}.") for bound in AT_START)


def _line(outcome: Outcome) -> str:
    """What the server prints of a reload."""
    restart = f"; needs a restart: {', '.join(outcome.needs_restart)}" if outcome.needs_restart else ""
    requests = "request" if outcome.affected == 1 else "requests"
    finish = " (they finish where they are)" if outcome.affected else ""
    return (
        f"reloaded {_short(outcome.version.file)} v{outcome.version.number} ({_counted(outcome.changes)}) "
        f"in {outcome.took_s * 1000:.0f} ms, {outcome.affected} {requests} affected{finish}{restart}"
    )


def _counted(found: tuple[Change, ...]) -> str:
    count, shown = len(found), [each.path for each in found[:3]]
    if not count:
        return "nothing that matters changed"
    more = f" and {count - 3} more" if count > 3 else ""
    return f"{count} change{'s' if count > 1 else ''}: {', '.join(shown)}{more}"


def _short(file: str) -> str:
    """The file's name alone: an operator knows the folder."""
    return Path(file).name

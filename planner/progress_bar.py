"""A progress bar on the terminal for computations that take seconds to minutes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

ShowProgress = Callable[[str, float], None]
"""A callback with a description of the present work and the share that is done, from 0 to 1."""


def can_show_progress() -> bool:
    """Return whether progress bars can be drawn: stderr is a terminal, and `rich` is installed."""
    return sys.stderr.isatty() and find_spec("rich") is not None


@contextmanager
def progress_bar(is_quiet: bool) -> Iterator[ShowProgress]:
    """Show a progress bar on stderr until the block ends, and yield the function that advances it.

    Nothing is shown if `is_quiet` is true or can_show_progress() is false.
    """
    if is_quiet or not can_show_progress():
        yield lambda name, share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda name, share: bar.update(task, description=name, completed=share)


@contextmanager
def progress_rows(is_quiet: bool) -> Iterator[ShowProgress]:
    """Show several progress bars on stderr until the block ends, for simultaneous work.

    It yields the function that advances them. A bar appears at the first call with its description.
    Nothing is shown in the same cases as with progress_bar().
    """
    if is_quiet or not can_show_progress():
        yield lambda name, share: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn
    from rich.progress import TimeElapsedColumn as Elapsed

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), Elapsed())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        rows: dict[str, TaskID] = {}

        def show_progress(name: str, share: float) -> None:
            if name not in rows:
                rows[name] = bars.add_task(name, total=1.0)
            bars.update(rows[name], completed=share)

        yield show_progress

"""The interactive `penstock top`, on textual: the same view, with a cursor and keys.

Lives here: widgets and keys. Not here: what is drawn (gateway/cli/top/render.py) and asked (operate.Server). Needs the extra `top`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, Protocol
from urllib.parse import quote

from rich.console import Group
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from gateway.admin.fleet_status import DRAINED
from gateway.cli.admin_client import NoAnswerError
from gateway.cli.explain import NEWEST
from gateway.cli.explain import lines as explained
from gateway.cli.top.render import COLUMNS, cells, flow, heading, reasons


class Source(Protocol):
    """Where views come from and wishes go: operate.Server, or a test's."""

    def try_ask(self, method: str, path: str) -> Any: ...
    def stream(self, path: str) -> Iterator[Any]: ...


class Told(ModalScreen[None]):
    """A page over the others; any of its keys closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter,q", "app.pop_screen", "close")]
    CSS = "Told { align: center middle; } Told Static { width: 90%; padding: 1 2; border: round $primary; }"

    def __init__(self, page: Group) -> None:
        super().__init__()
        self._page = page

    def compose(self) -> ComposeResult:
        yield Static(self._page)


class Confirm(ModalScreen[bool]):
    """A question over the view; `y` answers yes, any other of its keys no."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes"),
        Binding("n,escape,q,enter", "answer(False)", "no"),
    ]
    CSS = "Confirm { align: center middle; } Confirm Static { width: auto; padding: 1 2; border: round $warning; }"

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        yield Static(f"{self._question}  y / n")

    def action_answer(self, confirmed: bool) -> None:
        self.dismiss(confirmed)


class Top(App[None]):
    """The fleet, twice a second. `shown` is the view on the screen, empty before the first."""

    TITLE = "penstock"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #heading { height: auto; padding: 0 1; }  DataTable { height: 1fr; }  #flow { height: auto; padding: 0 1; }
    #why { height: auto; max-height: 9; padding: 0 1; border-top: solid $primary-muted; }  #filter { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("d", "drain", "drain / bring back"),
        Binding("enter", "explain", "explain", priority=False),
        Binding("p", "pause", "pause"),
        Binding("slash", "filter", "filter"),
        Binding("escape", "unfilter", "all", show=False),
        Binding("q", "quit", "quit"),
    ]

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._source = source
        self.shown: Mapping[str, Any] = {}
        self._paused = False
        self._wanted = ""

    def compose(self) -> ComposeResult:
        yield Static(id="heading")
        yield DataTable[Text](cursor_type="row", zebra_stripes=False)
        yield Static(id="flow")
        yield Static(id="why")
        yield Input(placeholder="filter by name, role or state", id="filter")
        yield Footer()

    def on_mount(self) -> None:
        table = self.query_one(DataTable)
        for name in COLUMNS:
            table.add_column(name, key=name)
        table.focus()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        """A thread of its own: it waits for the gateway, and hands frames to the screen's loop."""
        try:
            for frame in self._source.stream("/live/stream"):
                if not self.is_running:
                    return
                self.call_from_thread(self.show, frame)
            ended = "the gateway has ended its stream"
        except NoAnswerError as error:
            ended = str(error)
        except RuntimeError:  # the screen has closed meanwhile
            return
        if self.is_running:
            self.call_from_thread(self.notify, ended, severity="error", timeout=3600)

    def show(self, view: Mapping[str, Any]) -> None:
        """The next frame, unless the user wants to look at this one."""
        if not self._paused:
            self.shown = view
            self._draw()

    def _draw(self) -> None:
        view = self.shown
        if not view:
            return
        mark = Text(" paused ", "reverse") if self._paused else Text("")
        self.query_one("#heading", Static).update(
            Group(*heading(view), mark) if self._paused else Group(*heading(view))
        )
        self._rows([each for each in view["endpoints"] if self._wanted in _words(each)])
        self.query_one("#flow", Static).update(flow(view["flow"]) if view["flow"]["pairs"] else "")
        self.query_one("#why", Static).update(Group(*reasons(view["why"])))

    def _rows(self, endpoints: list[Mapping[str, Any]]) -> None:
        """Cells are changed in place, so that the cursor stays where it is."""
        table = self.query_one(DataTable)
        keys = [_key(each) for each in endpoints]
        if [key.value for key in table.rows] != keys:
            at = table.cursor_row
            table.clear()
            for each in endpoints:
                table.add_row(*cells(each), key=_key(each))
            table.move_cursor(row=min(at, max(0, len(keys) - 1)))
            return
        for each in endpoints:
            for column, cell in zip(COLUMNS, cells(each), strict=True):
                table.update_cell(_key(each), column, cell, update_width=True)

    def _chosen(self) -> Mapping[str, Any] | None:
        table = self.query_one(DataTable)
        if not table.row_count:
            return None
        key = table.ordered_rows[table.cursor_row].key.value
        return next((each for each in self.shown["endpoints"] if _key(each) == key), None)

    def action_drain(self) -> None:
        """Drain the chosen endpoint after a confirmation, or bring it back."""
        each = self._chosen()
        if each is None:
            return
        name = each["name"]
        if each["state"] in DRAINED:
            self._change(name, "undrain")
            return
        question = f"Drain {name}? It gets no new requests; {each['in_flight']} in flight finish."
        self.push_screen(Confirm(question), lambda confirmed: self._change(name, "drain") if confirmed else None)

    def _change(self, name: str, action: str) -> None:
        self._ask("POST", f"/endpoints/{quote(name, safe='')}/{action}", partial(self._drained, name))

    def _drained(self, name: str, told: Mapping[str, Any]) -> None:
        done = "gets nothing new" if told.get("drained") else "is asked again"
        self.notify(told.get("message") or f"{name} {done}")

    def _ask(self, method: str, path: str, tell: Callable[[Mapping[str, Any]], None]) -> None:
        """Have the gateway asked beside the screen, which goes on whatever comes of it; `tell` hears the answer."""

        def asked() -> None:
            try:
                told = self._source.try_ask(method, path)
            except NoAnswerError as error:
                self.call_from_thread(self.notify, str(error), severity="error")
            else:
                self.call_from_thread(tell, told)

        self.run_worker(asked, thread=True)

    def on_data_table_row_selected(self) -> None:
        self.action_explain()

    def action_explain(self) -> None:
        """The chosen endpoint in full, and why the newest request went where it went."""
        each = self._chosen()
        if each is not None:
            self._ask("GET", f"/explain/{NEWEST}", partial(self._explained, each))

    def _explained(self, each: Mapping[str, Any], newest: Mapping[str, Any]) -> None:
        labels = " ".join(f"{name}={value}" for name, value in each["labels"].items())
        facts = [Text(each["name"], "bold"), Text(f"{each['url']}  {each['pool']} {each['engine']} {labels}"), Text("")]
        told = [reason for reason in self.shown["why"] if reason["endpoint"] == each["name"]]
        lines = explained(newest) if "id" in newest else ["no request yet"]
        self.push_screen(Told(Group(*facts, *reasons(told), Text("\nthe newest request", "bold"), *map(Text, lines))))

    def action_pause(self) -> None:
        self._paused = not self._paused
        self._draw()

    def action_filter(self) -> None:
        entry = self.query_one("#filter", Input)
        entry.styles.display = "block"
        entry.focus()

    def action_unfilter(self) -> None:
        entry = self.query_one("#filter", Input)
        entry.value = ""
        self._shut(entry)

    def on_input_changed(self, changed: Input.Changed) -> None:
        self._wanted = changed.value.strip().lower()
        self._draw()

    def on_input_submitted(self, submitted: Input.Submitted) -> None:
        self._shut(submitted.input)

    def _shut(self, entry: Input) -> None:
        entry.styles.display = "none"
        self.query_one(DataTable).focus()


def _key(each: Mapping[str, Any]) -> str:
    """Of its row: one who leaves may have the name of one who came."""
    return f"{each['name']} {each['url']} {each['pool']}"


def _words(each: Mapping[str, Any]) -> str:
    return f"{each['name']} {each['pool']} {each['role']} {each['state']} {each['layout']}".lower()

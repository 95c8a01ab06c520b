"""The interactive version of `penstock top`: the live view with a cursor and keys.

This module has the widgets and keys, built on the library textual (the extra `top`). render.py
draws the view, and AdminClient sends requests.
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

from gateway.admin.endpoints_page import DRAINED_STATES
from gateway.cli.admin_client import AdminServerError
from gateway.cli.explain import NEWEST_REQUEST
from gateway.cli.explain import explanation_lines as explained
from gateway.cli.top.render import (
    COLUMNS,
    endpoint_cells,
    render_diagnosis,
    render_flow,
    render_heading,
)


class ViewSource(Protocol):
    """The interface through which `penstock top` reads views and sends requests.

    AdminClient implements it, and so do fakes in tests.
    """

    def try_request(self, method: str, path: str) -> Any: ...
    def stream(self, path: str) -> Iterator[Any]: ...


class DetailPage(ModalScreen[None]):
    """A page shown on top of the live view; the keys escape, enter and q close it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter,q", "app.pop_screen", "close")]
    CSS = """
    DetailPage { align: center middle; }
    DetailPage Static { width: 90%; padding: 1 2; border: round $primary; }
    """

    def __init__(self, page: Group) -> None:
        super().__init__()
        self._page = page

    def compose(self) -> ComposeResult:
        yield Static(self._page)


class ConfirmDialog(ModalScreen[bool]):
    """A yes/no question shown on top of the live view; only the key `y` means yes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "yes"),
        Binding("n,escape,q,enter", "answer(False)", "no"),
    ]
    CSS = """
    ConfirmDialog { align: center middle; }
    ConfirmDialog Static { width: auto; padding: 1 2; border: round $warning; }
    """

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        yield Static(f"{self._question}  y / n")

    def action_answer(self, confirmed: bool) -> None:
        self.dismiss(confirmed)


class TopApp(App[None]):
    """The terminal application, which redraws the live view twice a second.

    `current_view` is the view on the screen. It is empty before the first frame.
    """

    TITLE = "penstock"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #heading { height: auto; padding: 0 1; }
    DataTable { height: 1fr; }
    #flow { height: auto; padding: 0 1; }
    #why { height: auto; max-height: 9; padding: 0 1; border-top: solid $primary-muted; }
    #filter { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("d", "drain", "drain / undrain"),
        Binding("enter", "explain", "explain", priority=False),
        Binding("p", "pause", "pause"),
        Binding("slash", "filter", "filter"),
        Binding("escape", "unfilter", "all", show=False),
        Binding("q", "quit", "quit"),
    ]

    def __init__(self, source: ViewSource) -> None:
        super().__init__()
        self._source = source
        self.current_view: Mapping[str, Any] = {}
        self._is_paused = False
        self._filter = ""

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
        # Receive frames in a thread and pass them to the application's event loop.
        try:
            for frame in self._source.stream("/live/stream"):
                if not self.is_running:
                    return
                self.call_from_thread(self.show_frame, frame)
            ended = "the gateway has closed the stream"
        except AdminServerError as error:
            ended = str(error)
        except RuntimeError:  # the application has exited meanwhile
            return
        if self.is_running:
            self.call_from_thread(self.notify, ended, severity="error", timeout=3600)

    def show_frame(self, view: Mapping[str, Any]) -> None:
        """Show `view`, the next frame of the live view, unless the user has paused the display."""
        if not self._is_paused:
            self.current_view = view
            self._draw()

    def _draw(self) -> None:
        view = self.current_view
        if not view:
            return
        mark = Text(" paused ", "reverse") if self._is_paused else Text("")
        self.query_one("#heading", Static).update(
            Group(*render_heading(view), mark) if self._is_paused else Group(*render_heading(view))
        )
        self._update_table(
            [row for row in view["endpoints"] if self._filter in _searchable_text(row)]
        )
        self.query_one("#flow", Static).update(
            render_flow(view["flow"]) if view["flow"]["pairs"] else ""
        )
        self.query_one("#why", Static).update(Group(*render_diagnosis(view["why"])))

    def _update_table(self, endpoints: list[Mapping[str, Any]]) -> None:
        # Update the table's cells in place, so that the cursor keeps its position.
        table = self.query_one(DataTable)
        keys = [_key(row) for row in endpoints]
        if [key.value for key in table.rows] != keys:
            cursor_row = table.cursor_row
            table.clear()
            for row in endpoints:
                table.add_row(*endpoint_cells(row), key=_key(row))
            table.move_cursor(row=min(cursor_row, max(0, len(keys) - 1)))
            return
        for row in endpoints:
            for column, cell in zip(COLUMNS, endpoint_cells(row), strict=True):
                table.update_cell(_key(row), column, cell, update_width=True)

    def _selected_row(self) -> Mapping[str, Any] | None:
        table = self.query_one(DataTable)
        if not table.row_count:
            return None
        key = table.ordered_rows[table.cursor_row].key.value
        return next((row for row in self.current_view["endpoints"] if _key(row) == key), None)

    def action_drain(self) -> None:
        """Drain the selected endpoint after a confirmation, or undrain it."""
        row = self._selected_row()
        if row is None:
            return
        name = row["name"]
        if row["state"] in DRAINED_STATES:
            self._change(name, "undrain")
            return
        question = (
            f"Drain {name}? It receives no new requests; {row['in_flight']} in flight will finish."
        )
        self.push_screen(
            ConfirmDialog(question),
            lambda confirmed: self._change(name, "drain") if confirmed else None,
        )

    def _change(self, name: str, action: str) -> None:
        self._send_request(
            "POST",
            f"/endpoints/{quote(name, safe='')}/{action}",
            partial(self._on_drain_reply, name),
        )

    def _on_drain_reply(self, name: str, reply: Mapping[str, Any]) -> None:
        effect = "receives no new requests" if reply.get("drained") else "receives requests again"
        self.notify(reply.get("message") or f"{name} {effect}")

    def _send_request(
        self, method: str, path: str, on_reply: Callable[[Mapping[str, Any]], None]
    ) -> None:
        # Send a request in a thread, and call `on_reply` with the reply, or show the error.
        def send_request() -> None:
            try:
                reply = self._source.try_request(method, path)
            except AdminServerError as error:
                self.call_from_thread(self.notify, str(error), severity="error")
            else:
                self.call_from_thread(on_reply, reply)

        self.run_worker(send_request, thread=True)

    def on_data_table_row_selected(self) -> None:
        self.action_explain()

    def action_explain(self) -> None:
        """Show the selected endpoint in full, and why the newest request was routed as it was."""
        row = self._selected_row()
        if row is not None:
            self._send_request(
                "GET", f"/explain/{NEWEST_REQUEST}", partial(self._show_details, row)
            )

    def _show_details(self, row: Mapping[str, Any], newest: Mapping[str, Any]) -> None:
        labels = " ".join(f"{name}={value}" for name, value in row["labels"].items())
        header = [
            Text(row["name"], "bold"),
            Text(f"{row['url']}  {row['pool']} {row['engine']} {labels}"),
            Text(""),
        ]
        diagnosis = [
            reason for reason in self.current_view["why"] if reason["endpoint"] == row["name"]
        ]
        lines = explained(newest) if "id" in newest else ["no request yet"]
        self.push_screen(
            DetailPage(
                Group(
                    *header,
                    *render_diagnosis(diagnosis),
                    Text("\nthe newest request", "bold"),
                    *map(Text, lines),
                )
            )
        )

    def action_pause(self) -> None:
        self._is_paused = not self._is_paused
        self._draw()

    def action_filter(self) -> None:
        entry = self.query_one("#filter", Input)
        entry.styles.display = "block"
        entry.focus()

    def action_unfilter(self) -> None:
        entry = self.query_one("#filter", Input)
        entry.value = ""
        self._hide_filter(entry)

    def on_input_changed(self, changed: Input.Changed) -> None:
        self._filter = changed.value.strip().lower()
        self._draw()

    def on_input_submitted(self, submitted: Input.Submitted) -> None:
        self._hide_filter(submitted.input)

    def _hide_filter(self, entry: Input) -> None:
        entry.styles.display = "none"
        self.query_one(DataTable).focus()


def _key(row: Mapping[str, Any]) -> str:
    # Return the key of an endpoint's row: name, URL and pool.
    #
    # A removed endpoint may have the same name.
    return f"{row['name']} {row['url']} {row['pool']}"


def _searchable_text(row: Mapping[str, Any]) -> str:
    return f"{row['name']} {row['pool']} {row['role']} {row['state']} {row['layout']}".lower()

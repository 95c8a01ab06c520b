"""What two configurations make different, in an operator's words, and one configuration as it may be shown.

Compared is what they mean (1s is 1000ms); shown is what their texts say: a reference as it was written, never what it
led to, and a secret that stands in a text not at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from gateway.config.load import MASK, Loaded, default_of
from gateway.config.problems import Path, show_path
from gateway.config.values import Secret, without_scheme

_POLICY = frozenset({"name", "parameters"})


class Change(msgspec.Struct, frozen=True):
    """One difference. `before` is None for what came, `after` for what went; alike: a reference leads elsewhere."""

    path: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        if self.before is None:
            return f"{self.path}: added {self.after}"
        if self.after is None:
            return f"{self.path}: removed {self.before}"
        if self.before == self.after:
            return f"{self.path}: {self.after} has another value now"
        return f"{self.path}: {self.before} -> {self.after}"


def changes(before: Loaded, after: Loaded) -> tuple[Change, ...]:
    """Everything that differs, in the order of the file format."""
    old, new = before.config.model_dump(by_alias=True), after.config.model_dump(by_alias=True)
    found = tuple(_walk(_Side(before.written, old, ()), _Side(after.written, new, ()), ()))

    def hide(text: str) -> str:
        return after.resolved.hide(before.resolved.hide(text))

    return tuple(
        Change(
            hide(each.path),
            None if each.before is None else hide(each.before),
            None if each.after is None else hide(each.after),
        )
        for each in (*found, *_rewritten(before, after))
    )


def _rewritten(before: Loaded, after: Loaded) -> Iterator[Change]:
    """Files that have the same name in both, and another content."""
    for path, digest in after.files.items():
        if before.files.get(path, digest) != digest and before.written.get(path) == after.written.get(path):
            name = str(after.written.get(path))
            yield Change(show_path(path), name, name)


def shown(loaded: Loaded) -> dict[str, Any]:
    """The whole configuration as JSON values, defaults filled in, secrets masked, references as written."""
    tree: dict[str, Any] = loaded.config.model_dump(mode="json", by_alias=True)
    for path, text in loaded.written.items():
        if isinstance(text, str) and "${" in text:
            _put(tree, path, text)
    return tree


def _put(tree: Any, path: Path, text: str) -> None:
    for part in path[:-1]:
        try:
            tree = tree[part]
        except (KeyError, IndexError, TypeError):
            return
    if isinstance(tree, dict):
        tree[str(path[-1])] = text
    elif isinstance(tree, list) and isinstance(path[-1], int):
        tree[path[-1]] = text


class _Side(msgspec.Struct, frozen=True):
    """A value on one side, and where its text is."""

    written: Mapping[Path, object]
    value: Any
    at: Path

    def inner(self) -> dict[str, _Side] | None:
        """Its parts by key; those of a list by what they are known by. None for a single value."""
        if isinstance(self.value, dict):
            return {key: _Side(self.written, value, (*self.at, key)) for key, value in self.value.items()}
        if isinstance(self.value, list | tuple) and self.value and isinstance(self.value[0], dict):
            parts = enumerate(self.value)
            return {_identity(value): _Side(self.written, value, (*self.at, index)) for index, value in parts}
        return None

    def text(self) -> str:
        """As an operator would write it."""
        if isinstance(self.value, Secret):
            found = self.written.get(self.at)
            return found if isinstance(found, str) else MASK
        found = self.written.get(self.at)
        if isinstance(self.value, dict) and found is None:
            return self._mapping()
        if isinstance(self.value, list | tuple):
            items = [_Side(self.written, each, (*self.at, index)).text() for index, each in enumerate(self.value)]
            return f"[{', '.join(items)}]"
        return _plain(default_of(self.at, self.value) if found is None else found)

    def _mapping(self) -> str:
        parts = self.inner() or {}
        if parts.keys() == _POLICY and not self.value["parameters"]:
            return parts["name"].text()
        if "url" in self.value:
            return self.value["url"] if self.written.get((*self.at, "url")) is None else parts["url"].text()
        told = {key: side for key, side in parts.items() if any(at[: len(side.at)] == side.at for at in self.written)}
        return "{" + ", ".join(f"{key}: {side.text()}" for key, side in told.items()) + "}"


def _walk(old: _Side, new: _Side, path: Path) -> Iterator[Change]:
    if old.value == new.value:
        return
    olds, news = old.inner(), new.inner()
    lists = isinstance(old.value, list | tuple) and isinstance(new.value, list | tuple)
    if lists:
        olds, news = _parts(old, olds, news), _parts(new, news, olds)
    renamed = olds is not None and olds.keys() == _POLICY and olds["name"].value != new.value["name"]
    if olds is None or news is None or renamed:
        yield Change(show_path(path), old.text(), new.text())
        return
    for key in {**olds, **news}:
        before, after = olds.get(key), news.get(key)
        here = (*path, _name(after or before, key))
        if before is None and after is not None:
            yield Change(show_path(here), None, after.text())
        elif after is None and before is not None:
            yield Change(show_path(here), before.text(), None)
        elif before is not None and after is not None:
            yield from _walk(before, after, here)


def _parts(side: _Side, mine: dict[str, _Side] | None, theirs: dict[str, _Side] | None) -> dict[str, _Side] | None:
    """An empty list beside one of mappings is one without parts."""
    return {} if mine is None and theirs is not None and not side.value else mine


def _identity(item: Mapping[str, Any]) -> str:
    return str(item.get("url") or item.get("name"))


def _name(side: _Side | None, key: str) -> str:
    """How a part of a list is called: an endpoint by its name rather than by its URL; a reference as it is written."""
    if side is None or not isinstance(side.value, dict) or not isinstance(side.at[-1], int):
        return key
    written = [side.written.get(at) for at in ((*side.at, "name"), (*side.at, "url"), side.at)]
    name = next((each for each in written if isinstance(each, str) and "${" in each), None)
    if "url" in side.value:
        own = side.value.get("name")
        return name if name is not None and name in written[: 1 if own else 2] else str(own or without_scheme(key))
    return name or key


def _plain(value: object) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)

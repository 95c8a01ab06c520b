"""Compares two configurations, or displays one, as an operator would write them.

Values are compared by meaning (1s equals 1000ms) and displayed as written. A reference such as
${NAME} is displayed, and its value never is. A secret that the text contains is masked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from gateway.config.loader import SECRET_MASK, LoadedConfig, default_of
from gateway.config.problems import Path, show_path
from gateway.config.value_types import Secret, without_scheme

_POLICY = frozenset({"name", "parameters"})


class ConfigChange(msgspec.Struct, frozen=True):
    """One difference between two configurations of the gateway.

    path    path of the setting in display form, such as pools.chat.endpoints[0].url
    before  the old value as text; None if the value was added
    after   the new value as text; None if it was removed

    `before` and `after` are the same text if the setting is a reference, such as ${NAME}, and only
    the value behind the reference has changed.
    """

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


def diff(before: LoadedConfig, after: LoadedConfig) -> tuple[ConfigChange, ...]:
    """Return all differences between two configurations, in the order of the file format's keys."""
    old, new = before.config.model_dump(by_alias=True), after.config.model_dump(by_alias=True)
    differences = tuple(_walk(_Side(before.written, old, ()), _Side(after.written, new, ()), ()))

    def hide(text: str) -> str:
        return after.resolved.hide(before.resolved.hide(text))

    return tuple(
        ConfigChange(
            hide(change.path),
            None if change.before is None else hide(change.before),
            None if change.after is None else hide(change.after),
        )
        for change in (*differences, *_changed_files(before, after))
    )


def _changed_files(before: LoadedConfig, after: LoadedConfig) -> Iterator[ConfigChange]:
    for path, digest in after.files.items():
        name = after.written.get(path)
        if before.files.get(path, digest) != digest and before.written.get(path) == name:
            yield ConfigChange(show_path(path), str(name), str(name))


def display(loaded: LoadedConfig) -> dict[str, Any]:
    """Return a configuration as JSON values for display.

    Default values are included, secrets are masked, and references are shown as written.
    """
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
    written: Mapping[Path, object]
    value: Any
    path: Path

    def children(self) -> dict[str, _Side] | None:
        # Return the values in a mapping by key, or in a list by identity.
        #
        # Return None for a plain value.
        if isinstance(self.value, dict):
            return {
                key: _Side(self.written, value, (*self.path, key))
                for key, value in self.value.items()
            }
        if isinstance(self.value, list | tuple) and self.value and isinstance(self.value[0], dict):
            return {
                _identity(value): _Side(self.written, value, (*self.path, index))
                for index, value in enumerate(self.value)
            }
        return None

    def text(self) -> str:
        # Return the value as text, as an operator would write it in the configuration.
        written = self.written.get(self.path)
        if isinstance(self.value, Secret):
            return written if isinstance(written, str) else SECRET_MASK
        if isinstance(self.value, dict) and written is None:
            return self._mapping_text()
        if isinstance(self.value, list | tuple):
            items = [
                _Side(self.written, item, (*self.path, index)).text()
                for index, item in enumerate(self.value)
            ]
            return f"[{', '.join(items)}]"
        return _plain(default_of(self.path, self.value) if written is None else written)

    def _mapping_text(self) -> str:
        children = self.children() or {}
        if children.keys() == _POLICY and not self.value["parameters"]:
            return children["name"].text()
        if "url" in self.value:
            if self.written.get((*self.path, "url")) is None:
                return str(self.value["url"])
            return children["url"].text()
        given = {
            key: side
            for key, side in children.items()
            if any(path[: len(side.path)] == side.path for path in self.written)
        }
        return "{" + ", ".join(f"{key}: {side.text()}" for key, side in given.items()) + "}"


def _walk(old: _Side, new: _Side, path: Path) -> Iterator[ConfigChange]:
    if old.value == new.value:
        return
    olds, news = old.children(), new.children()
    if isinstance(old.value, list | tuple) and isinstance(new.value, list | tuple):
        olds, news = _or_empty(old, olds, news), _or_empty(new, news, olds)
    renamed = (
        olds is not None and olds.keys() == _POLICY and olds["name"].value != new.value["name"]
    )
    if olds is None or news is None or renamed:
        yield ConfigChange(show_path(path), old.text(), new.text())
        return
    for key in {**olds, **news}:
        before, after = olds.get(key), news.get(key)
        here = (*path, _name(after or before, key))
        if before is None and after is not None:
            yield ConfigChange(show_path(here), None, after.text())
        elif after is None and before is not None:
            yield ConfigChange(show_path(here), before.text(), None)
        elif before is not None and after is not None:
            yield from _walk(before, after, here)


def _or_empty(
    side: _Side, mine: dict[str, _Side] | None, theirs: dict[str, _Side] | None
) -> dict[str, _Side] | None:
    # Return the children `mine` of a value, or {} where an empty list is compared with children.
    #
    # An empty list itself has no children (None), because it has no members to name.
    return {} if mine is None and theirs is not None and not side.value else mine


def _identity(item: Mapping[str, Any]) -> str:
    return str(item.get("url") or item.get("name"))


def _name(side: _Side | None, key: str) -> str:
    # Return the name under which a configuration value is shown as part of its parent.
    #
    # An endpoint is shown by its name rather than its URL, and a reference as it is written.
    if side is None or not isinstance(side.value, dict) or not isinstance(side.path[-1], int):
        return key
    paths = ((*side.path, "name"), (*side.path, "url"), side.path)
    written = [side.written.get(path) for path in paths]
    reference = next((text for text in written if isinstance(text, str) and "${" in text), None)
    if "url" in side.value:
        own_name = side.value.get("name")
        if reference is not None and reference in written[: 1 if own_name else 2]:
            return reference
        return str(own_name or without_scheme(key))
    return reference or key


def _plain(value: object) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)

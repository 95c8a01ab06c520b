"""References in a configuration that was sent over HTTP: which of them may be resolved.

Whoever sends a text must not choose which variable or file of the gateway's machine goes where. So a reference is
resolved only if a text that the operator put in force has it at the same kind of place. Not here: what they resolve to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gateway.config.problems import Path
from gateway.config.source import references_in, written_values

NEW_REFERENCE = (
    "was sent over HTTP and has a reference that the running configuration does not have at such a place; "
    "write it into the file and reload"
)
NEW_ADDRESS = (
    "was sent over HTTP without admin.key, so a value with a reference must be as the running configuration has it, "
    "and a key must stay with its address; write it into the file and reload"
)

Known = frozenset[tuple[object, ...]]


def unresolvable(
    text: bytes, file: str, known: Sequence[bytes], *, with_key: bool
) -> dict[Path, str]:
    """Return why values of a text that was sent may not be resolved, by path. Raises ConfigError for what is no YAML.

    known     the texts whose references are allowed; empty for a gateway without a text
    with_key  the sender has shown admin.key. Without one, not only a reference must be known but the whole value, and
              the address that a key or password is sent to
    """
    texts = [written_values(each, file) for each in known if each]
    allowed: Known = frozenset(fact for each in texts for fact in _facts(each, with_key))
    sent = written_values(text, file)
    message = NEW_REFERENCE if with_key else NEW_ADDRESS
    return {
        path: message
        for path, value in sent.items()
        if not allowed.issuperset(_facts_of(path, value, sent, with_key))
    }


def _facts(written: Mapping[Path, object], with_key: bool) -> Iterator[tuple[object, ...]]:
    for path, value in written.items():
        yield from _facts_of(path, value, written, with_key)


def _facts_of(
    path: Path, value: object, written: Mapping[Path, object], with_key: bool
) -> Iterator[tuple[object, ...]]:
    """What must be known of a value with references: where it stands and, if need be, where it is sent."""
    found = references_in(value) if isinstance(value, str) else ()
    if with_key:
        yield from ((_kind(path), each) for each in found)
    elif found:
        yield _kind(path), value, _address(path, written)


def _kind(path: Path) -> Path:
    """The path without numbers and without the names that an operator gives to pools and classes."""
    named = 1 if path[0] == "pools" else 2 if path[:2] == ("slo", "classes") else -1
    return tuple(
        "*" if isinstance(part, int) or at == named else part for at, part in enumerate(path)
    )


def _address(path: Path, written: Mapping[Path, object]) -> tuple[object, ...]:
    """The values that say where a key or password is sent, and how; empty for any other value."""
    section, key = path[:-1], path[-1]
    if key == "api_key" and "discover" in path:
        return _below(section[:-1], written, but=(key,))
    if key == "api_key":
        return (written.get((*section, "url")), *_below((*section, "tls"), written))
    if path == ("observability", "traces", "key"):
        return (written.get((*section, "endpoint")),)
    if path == ("shared", "redis", "password"):
        return (written.get((*section, "url")), *_below((*section, "tls"), written))
    return ()


def _below(
    section: Path, written: Mapping[Path, object], but: Sequence[object] = ()
) -> tuple[object, ...]:
    length = len(section)
    found = [(path[length:], value) for path, value in written.items() if path[:length] == section]
    return tuple(
        sorted(((path, str(value)) for path, value in found if path[-1] not in but), key=str)
    )

"""Decides which references such as ${NAME} may be resolved in a configuration received over HTTP.

The sender must not be able to read arbitrary variables or files of the gateway's machine. Therefore
a reference is resolved only if an applied configuration has the same reference in the same kind of
setting. This module never sees the values of references.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gateway.config.problems import Path
from gateway.config.s3_section import S3_SECRETS
from gateway.config.yaml_source import references_in, written_values

NEW_REFERENCE = (
    "was sent over HTTP and has a reference that the running configuration does not have in such "
    "a setting, so the reference is not resolved; write it into the file and reload"
)
NEW_ADDRESS = (
    "was sent over HTTP without admin.key; then a value with a reference, and the address to which "
    "a key is sent, must be those of the running configuration; write it into the file and reload"
)

Fact = tuple[object, ...]


def unresolvable(
    text: bytes, file: str, known: Sequence[bytes], *, with_key: bool
) -> dict[Path, str]:
    """Return the references that a received configuration must not use, each with the reason.

    The keys of the result are the paths of the values that contain the references, such as ${NAME}.

    text      the received configuration text
    known     the texts whose references are allowed; b"" for a configuration without a text
    with_key  whether the sender has authenticated with admin.key. If True, a reference is allowed
              if a known text has it in the same kind of setting. If False, a known text must have
              the same whole value there; for a key or password, also the address that gets it

    Raises ConfigError if a text is not YAML.
    """
    texts = [written_values(known_text, file) for known_text in known if known_text]
    allowed = frozenset(fact for written in texts for fact in _facts(written, with_key))
    sent = written_values(text, file)
    message = NEW_REFERENCE if with_key else NEW_ADDRESS
    return {
        path: message
        for path, value in sent.items()
        if not allowed.issuperset(_facts_of(path, value, sent, with_key))
    }


def _facts(written: Mapping[Path, object], with_key: bool) -> Iterator[Fact]:
    for path, value in written.items():
        yield from _facts_of(path, value, written, with_key)


def _facts_of(
    path: Path, value: object, written: Mapping[Path, object], with_key: bool
) -> Iterator[Fact]:
    # Yield what must be known of a value with references: its place, and its address if needed.
    references = references_in(value) if isinstance(value, str) else ()
    if with_key:
        yield from ((_kind(path), reference) for reference in references)
    elif references:
        yield _kind(path), value, _address(path, written)


def _kind(path: Path) -> Path:
    # Return the path without indices and without the operator's names of pools and classes.
    name_index = 1 if path[0] == "pools" else 2 if path[:2] == ("slo", "classes") else -1
    return tuple(
        "*" if isinstance(part, int) or index == name_index else part
        for index, part in enumerate(path)
    )


def _address(path: Path, written: Mapping[Path, object]) -> tuple[object, ...]:
    # Return the values that determine where and how a key or password is sent.
    #
    # The result is empty for any other value.
    section, key = path[:-1], path[-1]
    if key == "api_key" and "discover" in path:
        return _values_below(section[:-1], written, left_out=(key,))
    if key == "api_key":
        return (written.get((*section, "url")), *_values_below((*section, "tls"), written))
    if path == ("observability", "traces", "key"):
        return (written.get((*section, "endpoint")),)
    if section == ("batch", "s3") and key in S3_SECRETS:
        return _values_below(section, written, left_out=S3_SECRETS)
    if path == ("shared", "redis", "password"):
        return (written.get((*section, "url")), *_values_below((*section, "tls"), written))
    return ()


def _values_below(
    section: Path, written: Mapping[Path, object], left_out: Sequence[object] = ()
) -> tuple[object, ...]:
    length = len(section)
    values = [(path[length:], value) for path, value in written.items() if path[:length] == section]
    kept = [(path, str(value)) for path, value in values if path[-1] not in left_out]
    return tuple(sorted(kept, key=str))

"""YAML 1.2 text to plain data, with the place of every value kept and ${...} references filled in.

Lives here: reading the file within hard caps, duplicate keys, aliases, substitution.
Not here: what the values mean (tree.py).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from gateway.config.problems import ConfigError, Mark, Path, Problem, show_path

FILE_CAP_BYTES = 1 << 20
SECRET_CAP_BYTES = 64 << 10
NODE_CAP = 100_000
DEPTH_CAP = 32
LEAST_HIDDEN = 8  # characters of what a reference led to, for it to be a secret
_NONE_REFUSED: Mapping[Path, str] = MappingProxyType({})
_START = Mark(1, 1)
_REFERENCE = re.compile(r"\$(\$)?\{([^{}]*)\}")
_OPEN = re.compile(r"(?<!\$)\$\{")
_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?", re.DOTALL)


def _int(text: str) -> int:
    digits = text.replace("_", "")
    if len(digits) > 20:
        raise ValueError(text)
    sign = -1 if digits.startswith("-") else 1
    digits = digits.lstrip("+-")
    base = {"0x": 16, "0o": 8, "0b": 2}.get(digits[:2], 10)
    return sign * int(digits if base == 10 else digits[2:], base)


def _float(text: str) -> float:
    return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))


def _bool(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text.lower(), text)  # yes and no are text since YAML 1.2


_PLAIN: Mapping[str, Callable[[str], Any]] = {
    "int": _int,
    "float": _float,
    "bool": _bool,
    "null": lambda text: None,
    "timestamp": str,
}


_OPENED: Mapping[str, str] = {"flow sequence": "bracket", "flow mapping": "brace", "quoted scalar": "quote"}
_CONTAINERS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


class Substituted(str):
    """Text in which a ${...} was replaced. Shows the reference, never the value: it may be a secret."""

    __slots__ = ("written",)
    written: str

    @property
    def all_by_reference(self) -> bool:
        """Whether nothing of it stands in the text: no word around a reference, and no default inside one."""
        return all(match[1] is None and ":-" not in match[2] for match in _REFERENCE.finditer(self.written)) and not (
            _REFERENCE.sub("", self.written).strip()
        )

    def __repr__(self) -> str:
        return repr(self.written)


def number_if_substituted(value: object) -> object:
    """The number in a text that came out of a ${...}; anything else as it is: "8080" in quotes is worth telling."""
    if not isinstance(value, Substituted):
        return value
    text = str(value).strip()
    if re.fullmatch(r"-?[0-9]{1,18}", text):
        return int(text)
    return float(text) if re.fullmatch(r"-?[0-9]{1,18}\.[0-9]{1,18}", text) else value


def numbers_if_substituted(value: Any) -> Any:
    """The same of all that is in a mapping or a list, however deep."""
    if isinstance(value, dict):
        return {key: numbers_if_substituted(each) for key, each in value.items()}
    if isinstance(value, list):
        return [numbers_if_substituted(each) for each in value]
    return number_if_substituted(value)


class Resolved:
    """What references of a text led to, so that no message shows it. Its repr shows nothing."""

    __slots__ = ("_by_value",)

    def __init__(self) -> None:
        self._by_value: dict[str, str] = {}

    def add(self, reference: str, value: str) -> None:
        """Note a value; one of a few characters would be found in any text, and is no secret."""
        if len(value) >= LEAST_HIDDEN:
            for each in (value, value.strip(), value.lower(), repr(value)[1:-1]):
                self._by_value[each] = reference

    def hide(self, text: str) -> str:
        """Return the text with references in place of what they led to."""
        for value in sorted(self._by_value, key=len, reverse=True):
            if value in text:
                text = text.replace(value, self._by_value[value])
        return text


class Source:
    """One file as data: `data` (plain values), `marks` (path -> place of a value), `keys` (path -> place of its key).

    `problems` collects what is wrong already; a path in it is not worth judging again. `doubts` has the warnings about
    files. `written` has every value as it stands in the text, references unfilled; `references` the files it names.
    `files` has the digest of each file whose path is a value. `resolved` has what references led to.
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self.data: Any = None
        self.written: dict[Path, object] = {}
        self.references: dict[FilePath, None] = {}
        self.files: dict[Path, bytes] = {}
        self.resolved = Resolved()
        self._digest = hashlib.sha256()
        self.marks: dict[Path, Mark] = {}
        self.keys: dict[Path, Mark] = {}
        self.problems: dict[Path, Problem] = {}
        self.doubts: list[Problem] = []

    def mark(self, path: Path, *, key: bool = False) -> Mark:
        """The place of `path` (of its key if asked); of its nearest parent that has one when it is not in the file."""
        if key and path in self.keys:
            return self.keys[path]
        while path and path not in self.marks:
            path = path[:-1]
        return self.marks.get(path, _START)

    def problem(self, path: Path, message: str, *, key: bool = False) -> Problem:
        """A Problem at the place of `path`."""
        mark = self.mark(path, key=key)
        return Problem(self.file, mark.line, mark.column, show_path(path), self.resolved.hide(message))

    def fail(self, path: Path, message: str, *, key: bool = False) -> None:
        """Notes a problem at `path`; the first one at a path is kept."""
        self.problems.setdefault(path, self.problem(path, message, key=key))

    def doubt(self, path: Path, message: str) -> None:
        """Notes a warning at `path`."""
        self.doubts.append(self.problem(path, message))

    def depends_on(self, *facts: bytes) -> None:
        """What the data was made from; any change of it changes `digest`."""
        for fact in facts:
            self._digest.update(b"%d:" % len(fact))
            self._digest.update(fact)

    @property
    def digest(self) -> bytes:
        """SHA-256 over the text and everything that its references led to. Never shown: secrets are in it."""
        return self._digest.digest()


def raw_bytes(path: FilePath) -> bytes:
    """The file as it is, at most one byte beyond the cap. Raises ConfigError when it cannot be read."""
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for its writer
            raise _refused(str(path), _START, "is not a regular file")
        with path.open("rb") as file:
            return file.read(FILE_CAP_BYTES + 1)
    except OSError as error:
        raise _refused(str(path), _START, f"cannot be read: {error.strerror}") from None


def parse(raw: bytes, file: str, env: Mapping[str, str], refused: Mapping[Path, str] = _NONE_REFUSED) -> Source:
    """Read YAML 1.2; `file` is the name shown in problems, and relative references start from its folder.

    `refused` says, by path, why the references of a value may not be resolved. Raises ConfigError when it is no YAML at
    all; lesser problems are in the Source.
    """
    return _parse(raw, file, env, refused)


def _parse(raw: bytes, file: str, env: Mapping[str, str] | None, refused: Mapping[Path, str]) -> Source:
    """As parse(); without an `env` no reference is resolved."""
    if len(raw) > FILE_CAP_BYTES:
        raise _refused(file, _START, f"is larger than {FILE_CAP_BYTES >> 20} MiB; is it the right file?")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - (raw.rfind(b"\n", 0, error.start) + 1) + 1
        raise _refused(file, Mark(line, column), "is not UTF-8 text") from None
    node = _compose(text, file)
    if node is None:
        raise _refused(file, _START, "is empty; the shortest configuration begins with `version: 1`")
    source = Source(file)
    source.depends_on(raw)
    source.data = _Reading(source, env, refused).value(node, ())
    return source


def written_values(raw: bytes, file: str) -> Mapping[Path, object]:
    """Every value of a text as it is written; no reference is resolved. Raises ConfigError for what is no YAML."""
    return _parse(raw, file, None, _NONE_REFUSED).written


def references_in(text: str) -> Sequence[str]:
    """The references in a value as it is written."""
    return [match[0] for match in _REFERENCE.finditer(text) if not match[1]]


def _compose(text: str, file: str) -> Node | None:
    try:
        node: Node | None = YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        raise _refused(file, *_misread(error)) from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        raise _refused(file, Mark(line, column), "holds a character that YAML does not allow") from None
    except RecursionError:
        raise _refused(file, _START, "is nested too deeply") from None
    except (YAMLError, ValueError) as error:
        raise _refused(file, _START, f"is not YAML: {error}") from None
    return node


def _misread(error: MarkedYAMLError) -> tuple[Mark, str]:
    """Where it is wrong, and how: what was opened and never closed is wrong where it was opened."""
    mark, opened = error.problem_mark or error.context_mark, error.context_mark
    unclosed = opened is not None and mark is not None and opened.line < mark.line
    for context, what in _OPENED.items():
        if unclosed and context in str(error.context):
            return Mark(opened.line + 1, opened.column + 1), f"is not YAML: the {what} opened here is not closed"
    place = Mark(mark.line + 1, mark.column + 1) if mark else _START
    return place, f"is not YAML: {error.problem or error.context}"


class _Reading:
    """One walk over a node tree. Owns the budget of values, which is what stops an alias bomb."""

    def __init__(self, source: Source, env: Mapping[str, str] | None, refused: Mapping[Path, str]) -> None:
        self._source = source
        self._env = env or {}
        self._resolves = env is not None
        self._refused = refused
        self._left = NODE_CAP

    def value(self, node: Node, path: Path) -> Any:
        source = self._source
        source.marks[path] = _mark(node)
        self._left -= 1
        if self._left < 0:
            raise ConfigError([source.problem(path, f"aliases expand to more than {NODE_CAP} values")])
        if len(path) > DEPTH_CAP:
            raise ConfigError([source.problem(path, f"is nested more than {DEPTH_CAP} deep, or an alias holds itself")])
        if not isinstance(node, ScalarNode) and str(node.tag) not in _CONTAINERS:
            source.fail(path, f"the tag {node.tag} is not allowed here")
        if isinstance(node, MappingNode):
            return self._mapping(node, path)
        if isinstance(node, SequenceNode):
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, ScalarNode)
        found = self._scalar(node, path)
        source.written[path] = found.written if isinstance(found, Substituted) else found
        return found

    def _mapping(self, node: MappingNode, path: Path) -> dict[str, Any]:
        filled: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode):
                raise ConfigError([_at(self._source, _mark(key_node), path, "a key must be plain text")])
            key = str(key_node.value)
            here = (*path, key)
            if key in filled:
                first = self._source.keys[here].line
                problem = _at(self._source, _mark(key_node), here, f'"{key}" is already given in line {first}')
                self._source.problems[*here, "(again)", _mark(key_node).line] = problem
                continue
            self._source.keys[here] = _mark(key_node)
            filled[key] = self.value(value_node, here)
            if filled[key] is None:  # the place of nothing is the next thing; its key is where one would look
                self._source.marks[here] = _mark(key_node)
        return filled

    def _scalar(self, node: ScalarNode, path: Path) -> Any:
        kind = str(node.tag).removeprefix("tag:yaml.org,2002:")
        if kind == "str":
            return self._substitute(node.value, path)
        if kind not in _PLAIN:
            self._source.fail(path, f"the tag {node.tag} is not allowed here")
            return None
        try:
            return _PLAIN[kind](str(node.value))
        except ValueError:
            self._source.fail(path, f"{node.value!r} is not a number that can be used here")
            return None

    def _substitute(self, text: str, path: Path) -> str:
        if "${" not in text:
            return text
        if not self._resolves or path in self._refused:
            if self._resolves:
                self._source.fail(path, self._refused[path])
            answer = Substituted("")
            answer.written = text
            return answer
        filled = _REFERENCE.sub(lambda match: self._reference(match, path), text)
        if _OPEN.search(_REFERENCE.sub(" ", text)):
            told = "a ${ is not closed, or another reference is inside of it; write $${ for a literal ${"
            self._source.fail(path, told)
        answer = Substituted(filled)
        answer.written = text
        return answer

    def _reference(self, match: re.Match[str], path: Path) -> str:
        if match[1]:
            return match[0][1:]  # $${literal} is how a literal ${ is written
        inside = match[2]
        if inside.startswith("file:"):
            return self._file(inside.removeprefix("file:"), path)
        variable = _VARIABLE.fullmatch(inside)
        if not variable:
            self._source.fail(
                path, f"{match[0]} is not a reference; write ${{NAME}}, ${{NAME:-default}} or ${{file:/path}}"
            )
            return ""
        found = self._env.get(variable[1])
        self._source.depends_on(variable[1].encode(), (found or "").encode("utf-8", "surrogateescape"))
        self._source.resolved.add(match[0], found or "")
        if variable[2] is not None:
            return found or variable[2]  # as in a shell, :- also replaces the empty text
        if found is None:
            self._source.fail(
                path, f"the environment has no {variable[1]}; set it, or write ${{{variable[1]}:-default}}"
            )
        return found or ""

    def _file(self, name: str, path: Path) -> str:
        place = FilePath(self._source.file).parent / name
        self._source.references[place] = None
        try:
            if place.exists() and not place.is_file():
                self._source.fail(path, f"{name} is not a regular file")
                return ""
            with place.open("rb") as file:
                raw = file.read(SECRET_CAP_BYTES + 1)
            self._source.depends_on(str(place).encode("utf-8", "surrogateescape"), raw)
            text = raw.decode()
        except OSError as error:
            self._source.fail(path, f"{name} cannot be read: {error.strerror}")
            return ""
        except ValueError:
            self._source.fail(path, f"{name} is not UTF-8 text")
            return ""
        if len(raw) > SECRET_CAP_BYTES:
            self._source.fail(path, f"{name} is larger than {SECRET_CAP_BYTES >> 10} KiB")
        text = text.removesuffix("\n").removesuffix("\r")
        self._source.resolved.add(f"${{file:{name}}}", text)
        return text


def _mark(node: Node) -> Mark:
    return Mark(node.start_mark.line + 1, node.start_mark.column + 1)


def _at(source: Source, mark: Mark, path: Path, message: str) -> Problem:
    return Problem(source.file, mark.line, mark.column, show_path(path), message)


def _refused(file: str, mark: Mark, message: str) -> ConfigError:
    return ConfigError([Problem(file, mark.line, mark.column, "", message)])

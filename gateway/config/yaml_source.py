"""Reads YAML 1.2 into plain data with positions, and resolves ${...} references. No I/O.

Texts that are too large are rejected, as are duplicate keys, and aliases that expand to very many
values.
file_reader.py reads the files, and root_section.py interprets the values.
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

from gateway.config.problems import ConfigError, Path, Problem, SourcePosition, show_path

MAX_FILE_BYTES = 1 << 20
MAX_SECRET_BYTES = 64 << 10
MAX_NODES = 100_000
MAX_DEPTH = 32
# A resolved value of fewer characters is not a secret, and could be found in any text.
LEAST_HIDDEN = 8
_NONE_REFUSED: Mapping[Path, str] = MappingProxyType({})
_START = SourcePosition(1, 1)
_REFERENCE = re.compile(r"\$(\$)?\{([^{}]*)\}")
_OPEN = re.compile(r"(?<!\$)\$\{")
_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?", re.DOTALL)


ReadFile = Callable[[FilePath, int], bytes]
"""A function that reads a file up to one byte more than a given limit.

It raises OSError or NotARegularFileError.
"""


class NotARegularFileError(Exception):
    """Raised for the path of a configuration file that is a folder, a pipe or a device."""


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
    # In YAML 1.2, unlike in YAML 1.1, `yes` and `no` are plain text.
    return {"true": True, "false": False}.get(text.lower(), text)


_PLAIN: Mapping[str, Callable[[str], Any]] = {
    "int": _int,
    "float": _float,
    "bool": _bool,
    "null": lambda text: None,
    "timestamp": str,
}


EMPTY_FILE = "is empty; the shortest configuration begins with `version: 1`"
_OPENED: Mapping[str, str] = {
    "flow sequence": "bracket",
    "flow mapping": "brace",
    "quoted scalar": "quote",
}
_CONTAINERS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


class Substituted(str):
    """A configuration value whose ${...} references were resolved.

    Its repr shows the references and not the values, because values may be secrets.
    """

    __slots__ = ("written",)
    written: str

    @property
    def is_all_by_reference(self) -> bool:
        """Return whether the written value consists only of references, without default values."""
        matches = _REFERENCE.finditer(self.written)
        if any(match[1] is not None or ":-" in match[2] for match in matches):
            return False
        return not _REFERENCE.sub("", self.written).strip()

    def __repr__(self) -> str:
        return repr(self.written)


def number_if_substituted(value: object) -> object:
    """Convert the text of a resolved ${...} reference to a number, if it has the form of one.

    All other values are returned unchanged. Therefore a number that was written in quotes, such as
    "8080", stays a text and is reported as an error.
    """
    if not isinstance(value, Substituted):
        return value
    text = str(value).strip()
    if re.fullmatch(r"-?[0-9]{1,18}", text):
        return int(text)
    return float(text) if re.fullmatch(r"-?[0-9]{1,18}\.[0-9]{1,18}", text) else value


def numbers_if_substituted(value: Any) -> Any:
    """Apply number_if_substituted() to all values in a mapping or list, at every depth."""
    if isinstance(value, dict):
        return {key: numbers_if_substituted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [numbers_if_substituted(item) for item in value]
    return number_if_substituted(value)


class ResolvedReferences:
    """The values of the references in a configuration. Messages show the references instead.

    Its repr shows no value.
    """

    __slots__ = ("_by_value",)

    def __init__(self) -> None:
        self._by_value: dict[str, str] = {}

    def add(self, reference: str, value: str) -> None:
        """Record the value of a reference, so that messages can hide it.

        Values shorter than LEAST_HIDDEN characters are not recorded.
        """
        if len(value) >= LEAST_HIDDEN:
            for form in (value, value.strip(), value.lower(), repr(value)[1:-1]):
                self._by_value[form] = reference

    def hide(self, text: str) -> str:
        for value in sorted(self._by_value, key=len, reverse=True):
            if value in text:
                text = text.replace(value, self._by_value[value])
        return text


class YamlSource:
    """The content of one configuration file as plain data, with positions and problems.

    data           the plain values
    positions      path -> position of the value
    key_positions  path -> position of the value's key
    problems       errors by path; a path with an error is not checked any further
    warnings       warnings about files that the configuration names
    written        path -> value as written, with references not resolved
    references     the files that the configuration refers to
    files          path of a value that names a file -> digest of that file
    resolved       the values of the references
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self.data: Any = None
        self.written: dict[Path, object] = {}
        self.references: dict[FilePath, None] = {}
        self.files: dict[Path, bytes] = {}
        self.resolved = ResolvedReferences()
        self._digest = hashlib.sha256()
        self.positions: dict[Path, SourcePosition] = {}
        self.key_positions: dict[Path, SourcePosition] = {}
        self.problems: dict[Path, Problem] = {}
        self.warnings: list[Problem] = []

    def position_of(self, path: Path, *, on_key: bool = False) -> SourcePosition:
        """Return the position of a value, or of its key, in the configuration file.

        For a value that is not in the file, this is the position of its nearest parent that is.
        """
        if on_key and path in self.key_positions:
            return self.key_positions[path]
        while path and path not in self.positions:
            path = path[:-1]
        return self.positions.get(path, _START)

    def problem_at(self, path: Path, message: str, *, on_key: bool = False) -> Problem:
        mark = self.position_of(path, on_key=on_key)
        text = self.resolved.hide(message)
        return Problem(self.file, mark.line, mark.column, show_path(path), text)

    def add_error(self, path: Path, message: str, *, on_key: bool = False) -> None:
        """Record a configuration error at `path`; only the first error at a path is kept."""
        self.problems.setdefault(path, self.problem_at(path, message, on_key=on_key))

    def warn(self, path: Path, message: str) -> None:
        self.warnings.append(self.problem_at(path, message))

    def add_to_digest(self, *facts: bytes) -> None:
        """Include `facts`, such as a file's content, in the digest of the configuration."""
        for fact in facts:
            self._digest.update(b"%d:" % len(fact))
            self._digest.update(fact)

    @property
    def digest(self) -> bytes:
        """Return the SHA-256 digest of the configuration text and of everything that it refers to.

        Do not show it to clients, because the hashed data contains secrets.
        """
        return self._digest.digest()


def parse_yaml(
    raw: bytes,
    file: str,
    env: Mapping[str, str],
    read_file: ReadFile,
    refused: Mapping[Path, str] = _NONE_REFUSED,
) -> YamlSource:
    """Parse YAML 1.2, and return its data with the problems found.

    file       the name shown in problems; relative references start at its folder
    read_file  function that reads the file of a ${file:...} reference
    refused    path of a value -> why the references in it must not be resolved

    Raises ConfigError if the text is not YAML.
    """
    source, node = _begin(raw, file)
    source.data = _Reader(source, env, read_file, refused).value(node, ())
    return source


def written_values(raw: bytes, file: str) -> Mapping[Path, object]:
    """Return every value of a configuration text as written, by path, without resolving references.

    Raises ConfigError if the text is not YAML.
    """
    source, node = _begin(raw, file)
    _WrittenReader(source, {}, _read_nothing, _NONE_REFUSED).value(node, ())
    return source.written


def references_in(text: str) -> Sequence[str]:
    return [match[0] for match in _REFERENCE.finditer(text) if not match[1]]


def _begin(raw: bytes, file: str) -> tuple[YamlSource, Node]:
    if len(raw) > MAX_FILE_BYTES:
        text = f"is larger than {MAX_FILE_BYTES >> 20} MiB; is it the right file?"
        raise invalid_file(file, text)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - (raw.rfind(b"\n", 0, error.start) + 1) + 1
        raise invalid_file(
            file, "the configuration is not UTF-8 text", SourcePosition(line, column)
        ) from None
    node = _compose(text, file)
    if node is None:
        raise invalid_file(file, EMPTY_FILE)
    source = YamlSource(file)
    source.add_to_digest(raw)
    return source, node


def _compose(text: str, file: str) -> Node | None:
    try:
        node: Node | None = YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        position, problem = _syntax_error(error)
        raise invalid_file(file, problem, position) from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - text.rfind("\n", 0, error.position)
        problem = "contains a character that YAML does not allow"
        raise invalid_file(file, problem, SourcePosition(line, column)) from None
    except RecursionError:
        raise invalid_file(file, "the configuration is nested too deeply") from None
    except (YAMLError, ValueError) as error:
        raise invalid_file(file, f"the configuration is not valid YAML: {error}") from None
    return node


_MEANINGS = {
    "but found another document": "a second document begins here (---); a file must have only one",
    "found character '\\t'": "a tab cannot indent; use blanks",
    "expected <block end>": "the indentation does not match the lines before",
    "mapping values are not allowed here": "a key cannot stand here; check the indentation and the "
    "colon of the line before",
}
"""What frequent messages of the YAML parser mean."""


def _syntax_error(error: MarkedYAMLError) -> tuple[SourcePosition, str]:
    # Return the position and the message of a syntax error.
    #
    # An unclosed bracket is reported where it was opened.
    mark, opened = error.problem_mark or error.context_mark, error.context_mark
    unclosed = opened is not None and mark is not None and opened.line < mark.line
    for context, what in _OPENED.items():
        if unclosed and context in str(error.context):
            position = SourcePosition(opened.line + 1, opened.column + 1)
            return position, f"is not YAML: the {what} opened here is not closed"
    position = SourcePosition(mark.line + 1, mark.column + 1) if mark else _START
    problem = error.problem or error.context or ""
    meaning = next((text for part, text in _MEANINGS.items() if part in problem), problem)
    return position, f"is not YAML: {meaning}"


class _Reader:
    def __init__(
        self,
        source: YamlSource,
        env: Mapping[str, str],
        read_file: ReadFile,
        refused: Mapping[Path, str],
    ) -> None:
        self._source = source
        self._env = env
        self._read_file = read_file
        self._refused = refused
        self._remaining = MAX_NODES

    def value(self, node: Node, path: Path) -> Any:
        source = self._source
        source.positions[path] = _mark(node)
        self._remaining -= 1
        if self._remaining < 0:
            problem = source.problem_at(path, f"aliases expand to more than {MAX_NODES} values")
            raise ConfigError([problem])
        if len(path) > MAX_DEPTH:
            text = f"is nested more than {MAX_DEPTH} deep, or an alias contains itself"
            raise ConfigError([source.problem_at(path, text)])
        if not isinstance(node, ScalarNode) and str(node.tag) not in _CONTAINERS:
            source.add_error(path, f"the tag {node.tag} is not allowed here")
        if isinstance(node, MappingNode):
            return self._mapping(node, path)
        if isinstance(node, SequenceNode):
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, ScalarNode)
        scalar = self._scalar(node, path)
        source.written[path] = scalar.written if isinstance(scalar, Substituted) else scalar
        return scalar

    def _mapping(self, node: MappingNode, path: Path) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, ScalarNode):
                problem = _at(self._source, _mark(key_node), path, "a key must be plain text")
                raise ConfigError([problem])
            key = str(key_node.value)
            key_path = (*path, key)
            if key in mapping:
                first = self._source.key_positions[key_path].line
                text = f'"{key}" is already given in line {first}'
                problem = _at(self._source, _mark(key_node), key_path, text)
                self._source.problems[*key_path, "(again)", _mark(key_node).line] = problem
                continue
            self._source.key_positions[key_path] = _mark(key_node)
            mapping[key] = self.value(value_node, key_path)
            # YAML places a missing value at the next token, so point to the key instead.
            if mapping[key] is None:
                self._source.positions[key_path] = _mark(key_node)
        return mapping

    def _scalar(self, node: ScalarNode, path: Path) -> Any:
        kind = str(node.tag).removeprefix("tag:yaml.org,2002:")
        if kind == "str":
            return self._substitute(node.value, path)
        if kind not in _PLAIN:
            self._source.add_error(path, f"the tag {node.tag} is not allowed here")
            return None
        try:
            return _PLAIN[kind](str(node.value))
        except ValueError:
            self._source.add_error(path, f"{node.value!r} is not a number that can be used here")
            return None

    def _substitute(self, text: str, path: Path) -> str:
        if "${" not in text:
            return text
        if path in self._refused:
            self._source.add_error(path, self._refused[path])
            return _substituted("", text)
        filled = _REFERENCE.sub(lambda match: self._reference(match, path), text)
        if _OPEN.search(_REFERENCE.sub(" ", text)):
            self._source.add_error(
                path,
                "a reference that begins with ${ is not closed, or has another reference inside; "
                "write $${ for a literal ${",
            )
        return _substituted(filled, text)

    def _reference(self, match: re.Match[str], path: Path) -> str:
        if match[1]:
            return match[0][1:]  # $${literal} is the way to write a literal ${
        inside = match[2]
        if inside.startswith("file:"):
            return self._file(inside.removeprefix("file:"), path)
        variable = _VARIABLE.fullmatch(inside)
        if not variable:
            self._source.add_error(
                path,
                f"{match[0]} is not a reference; "
                "write ${NAME}, ${NAME:-default} or ${file:/path}",
            )
            return ""
        value = self._env.get(variable[1])
        self._source.add_to_digest(
            variable[1].encode(), (value or "").encode("utf-8", "surrogateescape")
        )
        self._source.resolved.add(match[0], value or "")
        if variable[2] is not None:
            return value or variable[2]  # as in a shell, :- also replaces an empty value
        if value is None:
            self._source.add_error(
                path,
                f"the environment has no {variable[1]}; "
                f"set it, or write ${{{variable[1]}:-default}}",
            )
        return value or ""

    def _file(self, name: str, path: Path) -> str:
        file_path = FilePath(self._source.file).parent / name
        self._source.references[file_path] = None
        try:
            raw = self._read_file(file_path, MAX_SECRET_BYTES)
            self._source.add_to_digest(str(file_path).encode("utf-8", "surrogateescape"), raw)
            text = raw.decode()
        except NotARegularFileError:
            self._source.add_error(path, f"{name} is not a regular file")
            return ""
        except OSError as error:
            self._source.add_error(path, f"{name} cannot be read: {error.strerror}")
            return ""
        except ValueError:
            self._source.add_error(path, f"{name} is not UTF-8 text")
            return ""
        if len(raw) > MAX_SECRET_BYTES:
            self._source.add_error(path, f"{name} is larger than {MAX_SECRET_BYTES >> 10} KiB")
        text = text.removesuffix("\n").removesuffix("\r")
        self._source.resolved.add(f"${{file:{name}}}", text)
        return text


class _WrittenReader(_Reader):
    def _substitute(self, text: str, path: Path) -> str:
        return _substituted("", text) if "${" in text else text


def _substituted(filled: str, written: str) -> Substituted:
    result = Substituted(filled)
    result.written = written
    return result


def _read_nothing(path: FilePath, limit: int) -> bytes:
    raise NotARegularFileError(path)


def _mark(node: Node) -> SourcePosition:
    return SourcePosition(node.start_mark.line + 1, node.start_mark.column + 1)


def _at(source: YamlSource, mark: SourcePosition, path: Path, message: str) -> Problem:
    return Problem(source.file, mark.line, mark.column, show_path(path), message)


def invalid_file(file: str, message: str, mark: SourcePosition = _START) -> ConfigError:
    return ConfigError([Problem(file, mark.line, mark.column, "", message)])

"""Builds a Config from a file or engine URLs, with all problems; also the file's JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path as FilePath
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

import msgspec
from pydantic import BaseModel, ValidationError

from gateway.config import cross_checks, secret_rules, tls_file_rules
from gateway.config.file_reader import read_config_file, read_file
from gateway.config.problems import ConfigError, Path, Problem, did_you_mean
from gateway.config.root_section import Config
from gateway.config.tls_sections import FOLDER_KEY
from gateway.config.yaml_source import EMPTY_FILE, ResolvedReferences, YamlSource, parse_yaml

SCHEMA_ID = "urn:penstock:config:v1"
SECRET_MASK = "**********"  # noqa: S105
_ENGINES_POOL = "engines"
_COMMAND_LINE = "command line"
ENGINE_KEY_VARIABLE = "PENSTOCK_ENGINE_KEY"
"""The environment variable that contains the API key for the engines of `serve --engine`."""
_NO_KINDS: Mapping[str, str] = MappingProxyType({})
_NONE_REFUSED: Mapping[Path, str] = MappingProxyType({})


class LoadedConfig(msgspec.Struct, frozen=True):
    """A valid configuration, its warnings, and the text and files that it was made from.

    file                name of the file, as shown in problems
    text                content of the file, with references such as ${NAME} as written
    references          the files that the text refers to
    digest              digest of the text and of the values of all its references
    written             path -> value as written in the text; secrets in it are masked
    has_secret_in_text  whether the text itself contains a secret, not only a reference to one
    files               path of a value that names a file -> digest of that file
    resolved            the values of the references, which must not appear in responses
    """

    config: Config
    warnings: tuple[Problem, ...] = ()
    file: str = ""
    text: bytes = b""
    references: tuple[FilePath, ...] = ()
    digest: bytes = b""
    written: Mapping[Path, object] = {}
    has_secret_in_text: bool = False
    files: Mapping[Path, bytes] = {}
    resolved: ResolvedReferences = ResolvedReferences()


def load_config(path: FilePath, env: Mapping[str, str]) -> Config:
    """Load the configuration file `path`, with the values of ${NAME} taken from `env`.

    Raises ConfigError with all problems.
    """
    return load_with_warnings(path, env).config


def load_with_warnings(path: FilePath, env: Mapping[str, str]) -> LoadedConfig:
    """Load a configuration file like load_config(), and return it with its warnings.

    `penstock check` shows the warnings.
    """
    return load_text(read_config_file(path), str(path), env)


def load_text(
    text: bytes, file: str, env: Mapping[str, str], refused: Mapping[Path, str] = _NONE_REFUSED
) -> LoadedConfig:
    """Load a configuration from its text, and return it with its warnings.

    file     name of the text in problems; relative paths start at its folder
    refused  path of a value -> why the references in it must not be resolved
             (uploaded_references.py)

    Raises ConfigError with all problems.
    """
    return _build(parse_yaml(text, file, env, read_file, refused), text)


def config_from_engines(
    urls: Sequence[str],
    policy: str,
    host: str,
    port: int,
    admin_port: int,
    engine_key: str | None = None,
    kinds: Mapping[str, str] = _NO_KINDS,
) -> LoadedConfig:
    """Build the configuration for `penstock serve --engine URL ...`.

    It has one pool, with the models that the engines list.

    engine_key  the API key that is sent to every engine. The configuration's text contains only a
                reference to it, because operators see the text
    kinds       the kinds of engines by URL; engines that are not listed are vLLM

    Raises ConfigError.
    """
    source = YamlSource(_COMMAND_LINE)
    key = {} if engine_key is None else {"api_key": f"${{{ENGINE_KEY_VARIABLE}}}"}
    source.data = {
        "version": 1,
        "listeners": {"api": {"host": host, "port": port}, "admin": {"port": admin_port}},
        "pools": {
            _ENGINES_POOL: {
                "policy": policy,
                "endpoints": [
                    {"url": url, **key, **({"engine": kinds[url]} if url in kinds else {})}
                    for url in urls
                ],
            }
        },
    }
    if engine_key is not None:
        known = {ENGINE_KEY_VARIABLE: engine_key}
        return load_text(json.dumps(source.data).encode(), _COMMAND_LINE, known)
    text = json.dumps(source.data).encode()  # JSON is valid YAML, so it can be read again
    source.add_to_digest(text)
    return _build(source, text)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of the configuration file, for editors and CI."""
    schema = Config.model_json_schema(by_alias=True)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": SCHEMA_ID,
        **schema,
        "title": "Penstock",
    }


def _build(source: YamlSource, text: bytes = b"") -> LoadedConfig:
    config: Config | None = None
    try:
        config = Config.model_validate(
            source.data, context={FOLDER_KEY: str(FilePath(source.file).parent)}
        )
        tls_file_rules.check_files(config, source)
    except ValidationError as error:
        _add_problems(source, error)
    for finding in cross_checks.errors(source.data):
        source.add_error(finding.path, finding.message, on_key=finding.is_on_key)
    if source.problems or config is None:
        raise ConfigError(source.problems.values(), source.references)
    doubts = [
        source.problem_at(finding.path, finding.message, on_key=finding.is_on_key)
        for finding in cross_checks.warnings(source.data)
    ]
    doubts += source.warnings
    in_clear = list(secret_rules.secrets_in_clear(source.data))
    return LoadedConfig(
        config,
        tuple(sorted(doubts, key=lambda problem: (problem.line, problem.col))),
        source.file,
        text,
        tuple(source.references),
        source.digest,
        source.written | dict.fromkeys(in_clear, SECRET_MASK),
        bool(in_clear),
        source.files,
        source.resolved,
    )


def _add_problems(source: YamlSource, error: ValidationError) -> None:
    for detail in error.errors(include_url=False, include_context=True):
        path, on_key = _split_location(detail["loc"])
        # Skip a value if its reference or the type of a parent has been reported already.
        if any(path[:length] in source.problems for length in range(1, len(path) + 1)):
            continue
        if detail["type"] == "too_short" and detail["input"]:
            continue  # the list seems empty only because all its items are invalid
        on_key = on_key or detail["type"] == "extra_forbidden"
        source.add_error(path, problem_text(detail, path), on_key=on_key)


def _split_location(loc: tuple[int | str, ...]) -> tuple[Path, bool]:
    if loc and loc[-1] == "[key]":
        return loc[:-1], True
    return loc, False


_MESSAGES: Mapping[str, str] = {
    "int_type": "must be a whole number, without quotes",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text; put a number or a date in quotes",
    "model_type": "must be a mapping of keys to values",
    "model_attributes_type": "must be a mapping of keys to values",
    "mapping_type": "must be a mapping of keys to values",
    "dict_type": "must be a mapping of keys to values",
    "tuple_type": "must be a list (one item per line, each after a dash)",
    "string_too_long": "is longer than {max_length} characters",
    "string_too_short": "is empty",
    "too_long": "has more than {max_length} items",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be a finite number",
    "literal_error": "must be {expected}",
    "enum": "must be {expected}",
}


def problem_text(detail: Any, path: Path) -> str:
    """Return the error message for one of pydantic's errors, which concerns the value at `path`."""
    kind, context = str(detail["type"]), detail.get("ctx", {})
    if kind == "extra_forbidden" and path[-1] == "<<":
        return "unknown key; YAML 1.2 has no merge keys (<<), so repeat the keys"
    if kind == "extra_forbidden":
        return f"unknown key{did_you_mean(str(path[-1]), _known_keys(path[:-1]))}"
    if kind == "missing":
        return f"is missing: {_description(path)}"
    if detail["input"] is None and not path:
        return EMPTY_FILE
    if detail["input"] is None:
        return "is empty; give it a value or remove the key"
    if kind == "value_error":
        return str(context["error"])
    if kind == "too_short":
        return "is empty; it needs at least one item"
    if kind == "string_pattern_mismatch" and not detail["input"]:
        return "is empty text"
    if kind == "string_pattern_mismatch":
        return f"has a character that is not allowed here (allowed: {context['pattern']})"
    template = _MESSAGES.get(kind)
    return template.format(**context) if template else str(detail["msg"])


def _known_keys(path: Path) -> Iterable[str]:
    section = _section(path)
    return [field.alias or name for name, field in section.model_fields.items()] if section else ()


def _description(path: Path) -> str:
    section = _section(path[:-1])
    field = section.model_fields.get(str(path[-1])) if section else None
    return field.description or "" if field else ""


def _section(path: Path) -> type[BaseModel] | None:
    section: type[BaseModel] | None = Config
    inside = False  # the next part of the path is an index or key of a list or mapping
    for part in path:
        if inside:
            inside = False
            continue
        field = section.model_fields.get(str(part)) if section else None
        if field is None:
            return None
        section = _section_in(field.annotation)
        inside = _is_container(field.annotation)
    return section


def _is_container(annotation: Any) -> bool:
    return get_origin(annotation) in (tuple, Mapping, dict)


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) is Literal:
        return None
    inner = (_section_in(argument) for argument in get_args(annotation))
    return next((section for section in inner if section), None)


def default_of(path: Path, value: object) -> object:
    """Return the default value of the setting at `path`, as written in a file (such as "30s").

    Returns `value` if the setting has no default.
    """
    section = _section(path[:-1])
    if section is None:
        return value
    fields = {field.alias or name: field for name, field in section.model_fields.items()}
    field = fields.get(str(path[-1]))
    default = field.default if field is not None else None
    return default if isinstance(default, str | int | float) else value

"""A gateway.yaml under construction, with notes about settings that have no exact equivalent."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from io import StringIO
from typing import Any

import msgspec
from ruamel.yaml import YAML

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-[^{}]*)?\}")
# $NAME of a shell, $(NAME) of Kubernetes, os.environ/NAME of LiteLLM
_FOREIGN = re.compile(
    r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)|\$([A-Za-z_][A-Za-z0-9_]*)|os\.environ/([A-Za-z_][A-Za-z0-9_]*)"
)
_SLUG = re.compile(r"[^a-z0-9]+")


class MigrationError(ValueError):
    """Raised if a configuration cannot be read, or lacks what a gateway.yaml must contain."""


class NoteKind(StrEnum):
    """The kind of a migration note: no equivalent, a difference, or something left to do."""

    DROPPED = "no counterpart"
    DIFFERS = "differs"
    TO_DO = "to do"


class MigrationNote(msgspec.Struct, frozen=True):
    """A note for the operator about a migration.

    item  the option or key of the other router's configuration that the note concerns
    """

    kind: NoteKind
    item: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.item}: {self.text}"


class Additions(msgspec.Struct, frozen=True):
    """Values that the operator supplies for a migration, because the source lacks them.

    model    name of the model, as clients and engines use it
    engines  URLs of engines, for a source that only selects pods
    service  name of the Kubernetes Service of the engines
    release  name of the Helm release of the engines
    """

    model: str | None = None
    engines: tuple[str, ...] = ()
    service: str | None = None
    release: str = "vllm"


class Draft:
    """The new configuration that a migration writes, as plain data, and the notes so far."""

    def __init__(self, additions: Additions | None = None) -> None:
        self.additions = additions or Additions()
        self.data: dict[str, Any] = {"version": 1, "pools": {}}
        self.notes: list[MigrationNote] = []
        self._secrets: dict[str, str] = {}

    def set(self, value: object, *path: str) -> None:
        """Set a value of the new configuration at a path of keys; create missing sections."""
        section = self.data
        for key in path[:-1]:
            section = section.setdefault(key, {})
        section[path[-1]] = value

    def get(self, *path: str) -> Any:
        """Return the value of the new configuration at a path of keys; None if there is none."""
        section: Any = self.data
        for key in path:
            section = section.get(key) if isinstance(section, dict) else None
        return section

    def drop(self, item: str, reason: str) -> None:
        """Add a note that gateway.yaml has no equivalent of an option or key of the source.

        item    the option or key
        reason  why there is none
        """
        self._note(NoteKind.DROPPED, item, reason)

    def differ(self, item: str, text: str) -> None:
        """Add a note that gateway.yaml's nearest equivalent of an option behaves differently.

        item  the option or key of the source
        text  the difference
        """
        self._note(NoteKind.DIFFERS, item, text)

    def do(self, item: str, text: str) -> None:
        """Add a note that the operator has to do something by hand after the migration.

        item  the option or key of the source that the note concerns
        text  what to do
        """
        self._note(NoteKind.TO_DO, item, text)

    def _note(self, kind: NoteKind, item: str, text: str) -> None:
        note = MigrationNote(kind, item, text)
        if note not in self.notes:
            self.notes.append(note)

    def refer(self, secret: str, name: str, item: str) -> str:
        """Return a reference such as ${NAME}, to be written in gateway.yaml in place of a secret.

        If `secret` is a reference to a variable already, it is returned in gateway.yaml's form. For
        a secret in plain text, ${name} is returned, and a note asks the operator to set `name`.

        secret  the secret, or a reference to it, in the other router's configuration
        name    name of the environment variable to use for a plain secret
        item    the option or key that contains the secret
        """
        text = with_references(secret)
        if _REFERENCE.fullmatch(text):
            return text
        names = self._secrets
        if secret not in names:
            taken = sum(other.rstrip("0123456789_") == name for other in names.values())
            names[secret] = f"{name}_{taken + 1}" if taken else name
        name = names[secret]
        self.do(item, f"set the environment variable {name} to its value; secrets are not copied")
        return f"${{{name}}}"

    def add_service(self, name: str, namespace: str | None, selector: object, port: object) -> None:
        """Add a note with the manifest of the headless Service that discovery needs."""
        metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
        spec = {"clusterIP": "None", "selector": selector, "ports": [{"port": port}]}
        manifest = {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}
        if not selector:
            self.do(f"Service {name}", "add a selector with labels of the engines' pods")
        self.do(f"Service {name}", f"kubectl apply -f - <<< '{json.dumps(manifest)}'")

    def text(self, origin: str) -> str:
        """Return the configuration as YAML; `origin` names the source in its first line."""
        out = StringIO()
        yaml = YAML()
        yaml.default_flow_style = False
        yaml.width = 100
        yaml.representer.ignore_aliases = lambda data: True
        yaml.indent(mapping=2, sequence=4, offset=2)
        yaml.dump(self.data, out)
        return f"# Converted from {origin} by penstock migrate.\n{out.getvalue()}"


def with_references(text: str) -> str:
    """Rewrite references to environment variables in a text as ${NAME}, gateway.yaml's form."""
    return _FOREIGN.sub(lambda match: f"${{{match[1] or match[2] or match[3]}}}", text)


def variables(data: object) -> Iterator[str]:
    """Yield the names of the environment variables that the strings in parsed YAML refer to."""
    if isinstance(data, Mapping):
        for value in data.values():
            yield from variables(value)
    elif isinstance(data, list):
        for item in data:
            yield from variables(item)
    elif isinstance(data, str):
        yield from (match[1] for match in _REFERENCE.finditer(data))


def url_variables(data: object) -> Iterator[str]:
    """Yield the names of the environment variables with which a `url` in parsed YAML begins."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            match = _REFERENCE.match(value) if key == "url" and isinstance(value, str) else None
            if match is not None:
                yield match[1]
            yield from url_variables(value)
    elif isinstance(data, list):
        for item in data:
            yield from url_variables(item)


def pool_name(model: str, taken: Mapping[str, object]) -> str:
    """Return a short pool name derived from a model's name, different from the names in `taken`."""
    short = _SLUG.sub("-", model.rsplit("/", 1)[-1].lower()).strip("-") or "engines"
    name, number = short, 2
    while name in taken:
        name, number = f"{short}-{number}", number + 1
    return name

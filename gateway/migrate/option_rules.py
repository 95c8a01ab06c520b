"""Converts a router's options by rules, and notes why other options have no equivalent."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from gateway.migrate.command_options import CommandOptions
from gateway.migrate.config_draft import Draft, MigrationError
from gateway.migrate.option_values import Converter


class Rule(msgspec.Struct, frozen=True):
    """How one option of another router is converted to a setting in gateway.yaml.

    path     path of the equivalent in gateway.yaml
    convert  function that converts the option's value
    differs  how the equivalent behaves differently; "" if it does not
    """

    path: tuple[str, ...]
    convert: Converter
    differs: str = ""


def apply_rules(options: CommandOptions, draft: Draft, rules: Mapping[str, Rule]) -> None:
    """Convert every router option that has exactly one equivalent in gateway.yaml."""
    for name, rule in rules.items():
        given = options.last(name)
        if given is None:
            continue
        try:
            value = rule.convert(given)
        except MigrationError as error:
            raise MigrationError(f"--{name}: {error}") from None
        if value is None:
            draft.drop(f"--{name} {given}", "only a value above zero has a counterpart")
            continue
        draft.set(value, *rule.path)
        if rule.differs:
            draft.differ(f"--{name}", rule.differs)


def drop_unread(options: CommandOptions, draft: Draft, reasons: Mapping[str, str]) -> None:
    """Add a note for every router option that was not converted.

    The keys of `reasons` are beginnings of option names. The longest one that matches an option
    gives the text of its note.
    """
    for name in options.unread_names():
        prefixes = [prefix for prefix in reasons if name.startswith(prefix)]
        reason = reasons[max(prefixes, key=len)] if prefixes else "the option is not known"
        draft.drop(f"--{name}", reason)

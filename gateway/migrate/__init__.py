"""Converts other routers' configurations to gateway.yaml, without I/O: text in, text and notes out.

router_detection.py recognizes the kind of a text. There is one reader for each source; all of them
write into a Draft, which also collects settings without a counterpart. The command is
gateway/cli/migrate.py.
"""

from gateway.migrate.config_draft import Additions, Draft, MigrationError, MigrationNote
from gateway.migrate.router_detection import SOURCES, convert_text, convert_words

__all__ = [
    "SOURCES",
    "Additions",
    "Draft",
    "MigrationError",
    "MigrationNote",
    "convert_text",
    "convert_words",
]

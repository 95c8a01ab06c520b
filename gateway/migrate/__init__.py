"""Converts other routers' configurations to gateway.yaml, without I/O: text in, text and notes out.

router_detection.py detects the kind of a text. There is one reader for each router. The readers
write into a Draft, which also collects settings that gateway.yaml has no equivalent of. The command
is in gateway/cli/migrate.py.
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

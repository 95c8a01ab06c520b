"""The endpoints: their table, health checks, load, discovery, reservations and cached prefixes."""

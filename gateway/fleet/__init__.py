"""The endpoints: table, capacity reservations, cache view, health checks, scrapes and discovery."""

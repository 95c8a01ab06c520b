"""The gateway as the admin server sees it."""

"""Who may enter a pool, who waits, and who is refused, as pure decisions."""

"""Choice among routing policies by estimates of their goodput on recent requests."""

"""The interface through which the admin server reads the running gateway."""

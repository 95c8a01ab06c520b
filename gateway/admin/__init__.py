"""The admin HTTP server: authentication, configuration pages, metrics, and the live view."""

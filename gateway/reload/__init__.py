"""Configuration reload: replaces the running configuration while requests run.

- reloader.py checks and applies a change, or rejects it.
- dry_run_and_swap.py replaces the running configuration.
- history.py stores the applied versions.
- file_watcher.py watches the configuration's files.

The admin pages for changes are in admin/config_pages.py.
"""

"""Configuration reload: a new configuration replaces the old one while requests run.

reloader.py is the transaction, swap.py applies it, history.py stores applied versions,
file_watcher.py watches the file, and admin/config_pages.py serves the admin pages.
"""

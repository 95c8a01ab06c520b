"""Reload: a new configuration takes the place of the old one while requests run, or the old one stays.

swap.py builds and swaps, reloader.py is the transaction around it, versions.py what was applied before, follow.py the
file, trial.py whether a change made things worse, pages.py the admin server's side.
"""

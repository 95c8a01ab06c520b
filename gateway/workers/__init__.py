"""Several gateway processes on one machine: a supervisor without API traffic, workers behind one port with one view.

process.py is one worker as the supervisor sees it, supervisor.py keeps them, configure.py changes their configuration
together, pages.py, merge.py, counted.py and watch.py are the one admin server, child.py is the process itself.
"""

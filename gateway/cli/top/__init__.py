"""The command `penstock top`, which shows the gateway's live view in a terminal.

command.py is the command, render.py draws the view with rich, and tui.py is the interactive
version, which needs the library textual (the extra `top`). Without textual, the view is shown, but
keys do nothing.
"""

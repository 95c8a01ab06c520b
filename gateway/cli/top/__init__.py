"""The command `penstock top`, which shows the gateway's live view in a terminal.

command.py is the command, render.py draws the view with rich, tui.py is the interactive version.
That version needs textual (the extra `top`); without it the view is drawn but keys do nothing.
"""

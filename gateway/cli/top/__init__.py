"""The command `penstock top`, which shows the gateway's live view in a terminal.

command.py is the command, render.py draws the view with rich, and tui.py is the interactive
version. The latter needs textual (the extra `top`); without textual, the view is drawn but keys do
nothing.
"""

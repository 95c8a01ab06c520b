"""`penstock top`: the live view in a terminal. gateway/cli/top/command.py the command, gateway/cli/top/render.py what is drawn with rich, gateway/cli/top/tui.py the
interactive one with textual, which is an extra: without it the same is drawn, and keys do nothing."""

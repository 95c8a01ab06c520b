"""`penstock top`: the live view in a terminal. cli.py the command, plain.py what is drawn with rich, screen.py the
interactive one with textual, which is an extra: without it the same is drawn, and keys do nothing."""

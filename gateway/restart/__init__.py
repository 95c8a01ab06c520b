"""Restart without refusing: listening sockets and learned state pass from one gateway process to the next.

gateway/http/listener_sockets.py and notify.py speak systemd's protocols; successor.py is the old process's side of a restart, predecessor.py
the new one's; channel.py carries messages between both; learned_state.py says what is worth handing over.
"""

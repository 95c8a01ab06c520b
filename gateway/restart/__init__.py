"""Restart without refusing connections: hand sockets and learned state to the next process.

sockets.py and notify.py implement systemd's protocols; successor.py is the old process's side of a
restart, predecessor.py the new one's; channel.py carries messages between them; learned_state.py
converts the state to messages and back.
"""

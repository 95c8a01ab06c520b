"""Restart without refusing connections: passes sockets and learned state to the next process.

- start_options.py and systemd_notify.py connect a process to systemd.
- successor.py is the old process's side of a restart; predecessor.py is the new process's side.
- channel.py has the messages between them.
- worker_launch_settings.py has the values that a supervisor gives to each worker.
- learned_state.py converts the state to messages and back.
"""

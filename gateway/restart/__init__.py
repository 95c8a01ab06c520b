"""Restart without refusing connections: passes sockets and learned state to the next process.

- start_options.py and systemd_notify.py connect a process to systemd.
- old_process_side.py runs in the process that ends; new_process_side.py, in its successor.
- handover_channel.py has the messages between them.
- worker_launch_settings.py has the values that a supervisor gives to each worker.
- learned_state.py converts the state to messages and back.
"""

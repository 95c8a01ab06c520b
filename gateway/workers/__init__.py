"""Several gateway processes on one machine: workers that share one port, run by a supervisor.

- supervisor.py starts and replaces workers; worker_process.py represents one of them there.
- config_rollout.py changes their configuration together.
- admin_server.py, page_merge.py, metrics_merge.py and live_view_merge.py serve the admin pages.
- worker_main.py is the entry point of a worker.
"""

"""Several gateway processes on one machine: a supervisor without API traffic, workers behind one port with one view.

gateway/workers/worker_process.py is one worker as the supervisor sees it, supervisor.py keeps them, gateway/workers/config_rollout.py changes their configuration
together, pages.py, gateway/workers/metrics_merge.py, gateway/workers/counter_totals.py and gateway/workers/live_view_merge.py are the one admin server, gateway/workers/worker_main.py is the process itself.
"""

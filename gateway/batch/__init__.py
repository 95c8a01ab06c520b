"""OpenAI's Batch API: stored files, and batches of requests that run in the background.

- http_handlers.py serves `/v1/files` and `/v1/batches`.
- batch_runner.py runs the requests of batches, through the same code as live requests.
- storage_interface.py is the interface to the storage of files and batches: a disk or a bucket.
"""

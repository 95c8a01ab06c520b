"""OpenAI's Batch API: stored files, and batches of requests that run in the background.

http_handlers.py serves `/v1/files` and `/v1/batches`; batch_runner.py runs the lines of batches
through the same request path as live requests; storage.py is the interface to what keeps files,
records and journals: a disk or a bucket.
"""

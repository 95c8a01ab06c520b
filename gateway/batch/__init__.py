"""OpenAI's Batch API: stored files, and batches of requests that run in the background.

pages.py serves `/v1/files` and `/v1/batches`; runner.py runs the lines of batches through the same
request path as live requests; store.py keeps files, records and journals on a local disk.
"""

"""Admission control: wait queues, quotas, and limits on concurrent requests, memory and retries."""

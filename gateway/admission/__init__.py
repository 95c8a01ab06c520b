"""Admission control: wait queues, permits, quotas, and the budgets for memory and retries."""

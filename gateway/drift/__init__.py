"""Detects workload drift: requests no longer resemble the workload that a pool was sized for."""

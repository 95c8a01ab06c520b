"""Detection of workload drift in a running gateway."""

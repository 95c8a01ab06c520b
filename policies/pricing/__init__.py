"""What serving a request costs, split or whole, here or on a smaller model."""

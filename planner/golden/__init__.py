"""`penstock golden`: compares the answers of two engines to the same prompts."""

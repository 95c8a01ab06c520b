"""The comparison of two engines' answers to the same prompts, as plain functions without I/O."""

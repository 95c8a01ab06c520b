"""The seeds (119 statements about LLM serving) as a list, each with the command that answers it."""

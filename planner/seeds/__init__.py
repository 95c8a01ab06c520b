"""The seeds as an executable list: each statement with the command that answers it."""

"""The attempt loop and its plans: a whole request, a pair, the rest of a broken stream, a smaller
model.
"""

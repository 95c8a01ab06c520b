"""What the gateway looks at by itself: engines' health, load and model names. Background work, never on a request's path."""

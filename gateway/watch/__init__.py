"""What the gateway looks at by itself: engines' health, load and models. Never on the path of a request."""

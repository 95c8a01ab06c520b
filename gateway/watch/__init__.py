"""Background queries to the engines: health, load and models. Never on the path of a request."""

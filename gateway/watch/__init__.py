"""Background queries to the engines about health, load and models, apart from client requests."""

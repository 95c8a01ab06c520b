"""Queries the engines in the background about their health, load and models, apart from client
requests.
"""

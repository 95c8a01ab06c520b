"""The live view: what a gateway does right now and did in the last minute, as one JSON value and as a stream of it.

marks.py notes the meters, standing.py how things stand, view.py and flow.py make the value of two notes and of that,
why.py the words, hub.py tells who watches.
"""

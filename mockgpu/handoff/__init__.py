"""The engine's side of a split request: each engine's contract, and its execution over kvtransfer.

One module per engine. They are written from the engines' behaviour alone, independent of the
gateway's side.
"""

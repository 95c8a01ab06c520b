"""The engine's side of a split request: each engine's contract (one module each), and the desk that carries it out over
kvtransfer's agents. Written from the engines' behaviour alone: the gateway's side is its counterpart, not its source.
"""

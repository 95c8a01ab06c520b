"""The command `penstock drift`: checks whether recorded requests have the shapes that a fleet was
sized for.
"""

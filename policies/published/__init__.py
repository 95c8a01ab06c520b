"""Other systems' routers by name, one small file per family: for who migrates, and to compare with.

Each is a Preset whose defaults are the published ones and whose docstring says where the rule was read. Names of
parameters are their owners'. Nothing here is of our own invention, and nothing is tuned per workload.
"""

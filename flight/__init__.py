"""TransferQueue: typed tables on an Arrow Flight server, with leases, groups and a staleness bound.

Needs pyarrow, msgspec and light libraries only; it never imports torch and knows nothing of the RL engine above.
"""

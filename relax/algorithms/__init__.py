"""Algorithms: pure functions on tensors. They hold no state, know no model and no table.

Importing this package loads no torch; `relax.algorithms.config` never does, the other modules do.
"""

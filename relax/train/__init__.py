"""Training: the Megatron-core language model, the optimizer step, checkpoints and weight export.

Importing this package loads no torch; `relax.train.config` never does, the other modules do.
"""

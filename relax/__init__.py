"""Relax: the RL engine above the TransferQueue: rollout, training, control plane and launchers."""

"""Rollouts: engines that generate completions behind one protocol, and rewards that score them."""

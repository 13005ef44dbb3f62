"""Rewards: plug-ins that score completions, alone or as a weighted sum, each under a time limit and with retries.

`base` has what a plug-in is made of, `registry` finds it, `scorer` runs all parts of the sum, `pool` keeps the worker
processes in which code that may hang or crash runs. One file is one plug-in.
"""

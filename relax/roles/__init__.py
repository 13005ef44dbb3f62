"""The services of a run, one module a role. Each is a program of its own: `python -m relax.roles ROLE`.

A role knows its queue, its control plane and its part of the configuration; it does not know who started it.
"""

"""The parts of tools/chaos.py: a run, faults drawn from a seed, and what must hold of the books afterwards."""

"""Agents: episodes of several turns with an environment or a program of yours, tokens kept as they were sampled."""

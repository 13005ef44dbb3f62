"""A run as a whole: its directory, the check before it starts and the driver that carries it through."""

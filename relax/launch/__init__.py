"""Launchers: start services as processes, watch them, end them. They know nothing of what a service does."""

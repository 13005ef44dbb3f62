"""Data: manifest lines to records, records to prompts with encoded media. Torch and sockets are in `dataset` alone."""

"""Modalities: encoded media to Arrow columns and back. Not models: no torch is imported here."""

"""Data: manifest lines to records, records to prompts with encoded media. No torch and no sockets here."""

"""The parts of tools/load_bus.py: many clients against one server for a long time, and what is made of it."""

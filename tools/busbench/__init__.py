"""The parts of `tools/bench_bus.py`: workloads, systems, the worker process of each system, rounds, and the report."""

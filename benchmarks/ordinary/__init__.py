"""Whole training steps of ordinary models: `python -m benchmarks.ordinary`."""

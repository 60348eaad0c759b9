"""Lowers and compiles regions: one thread of the process, and a second process for what no step waits for."""

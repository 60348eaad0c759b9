"""Threads: the gate to the engine, locks on leaves, forks."""

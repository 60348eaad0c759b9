"""Runs a program: the steps of a tape graph, one after the other, and what the engine would answer meanwhile."""

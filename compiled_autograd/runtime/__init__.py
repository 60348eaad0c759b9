"""Runs the steps of a tape graph."""

"""Hooks and Python functions of the user: how they are called as they are, and what they may do meanwhile."""

"""When something is compiled, where, and whether it is worth it."""

"""The report of a session: its backwards, and the stages, regions, memory and timings of each graph."""

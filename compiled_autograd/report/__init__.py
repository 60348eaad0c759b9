"""What a session adds to a report: its steps, and of each graph the stages, regions, memory and timings."""

"""A region to a functional ATen graph, and what a backend makes of it."""

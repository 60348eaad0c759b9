"""The fused backend: what Inductor makes of an ATen graph, how it is kept, and what of it is mended."""

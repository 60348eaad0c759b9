"""Checks whether a tape may run on the CUDA device and stream on which backward is called."""

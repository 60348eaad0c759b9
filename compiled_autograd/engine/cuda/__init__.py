"""Whether a tape may run on the CUDA device and stream that backward is called on."""

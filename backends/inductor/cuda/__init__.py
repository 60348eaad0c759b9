"""Regions on a CUDA device."""

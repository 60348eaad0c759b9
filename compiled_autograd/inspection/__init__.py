"""Inspection: read a tape without running it, then list it, draw it and sum its memory. Keeps nothing of the tape."""

"""One backward, or one region of one, written down as data: what it computes and of which values."""

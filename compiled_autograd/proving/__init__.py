"""Every compiled form proves itself: before it is trusted, what it gives is compared with what the real calls give."""

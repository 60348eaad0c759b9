"""Hits that are served from C++, from the call of ``run_backward`` to the account."""

"""Diagnostics: why a backward was no hit, in the user's terms, and the logs and warnings that say it."""

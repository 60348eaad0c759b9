"""Reproductions: one backward, or one of its regions, stored as data: its operators and its values."""

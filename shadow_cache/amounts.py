"""Format sizes, durations, dates and counts for people."""

from __future__ import annotations

import datetime

_UNITS = (("year", 365 * 86400), ("month", 30 * 86400), ("day", 86400), ("hour", 3600), ("minute", 60))


def size(count: float) -> str:
    """Format bytes with decimal units: ``3.2 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.95 or (unit == "B" and count < 1000):
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def seconds(value: float) -> str:
    """Format a duration in seconds: ``231 ms``, ``17.3 s``, ``2 min 5 s``, ``1 h 4 min``."""
    if value < 0.9995:
        return f"{value * 1000:.0f} ms"
    if value < 99.95:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def ago(when: float, now: float) -> str:
    """Format the time between ``when`` and ``now``: ``2 hours ago``. Both are seconds since the epoch."""
    past = now - when
    for unit, length in _UNITS:
        if past >= length:
            return f"{plural(int(past // length), unit)} ago"
    return "just now"


def date(when: float) -> str:
    """Format seconds since the epoch in UTC: ``2024-05-01 12:30 UTC``."""
    return f"{datetime.datetime.fromtimestamp(when, datetime.timezone.utc):%Y-%m-%d %H:%M} UTC"


def plural(count: int, noun: str, nouns: str = "") -> str:
    """Format a count: ``1 entry``, ``2 entries``. ``nouns`` is the plural where it is not ``noun`` with an ``s``."""
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"

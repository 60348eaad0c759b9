"""Counts other references to an object, in a way that is the same in each version of Python.

The number of references from a call to its arguments differs: an interpreter may lend them (since 3.14 it does). So an
object is examined inside a list, and the count of an unshared object there is measured.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any


def references(values: Sequence[Any], index: int) -> int:
    """Return the number of references to an object in a list: :data:`COUNT_OF_UNSHARED`, plus one for each other
    reference."""
    return sys.getrefcount(values[index])


COUNT_OF_UNSHARED = references([object()], 0)
"""The count of an object to which only the list refers."""

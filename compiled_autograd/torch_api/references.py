"""Whether anybody else refers to an object, counted in a way that every version of Python counts alike.

How many references a call has to its arguments differs: an interpreter may lend them (since 3.14 it does). So an object
is looked at where it lies in a list, and what an object counts there that is nobody else's is measured.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any


def references(values: Sequence[Any], index: int) -> int:
    """How often something in a list is referred to: :data:`COUNT_OF_UNSHARED`, and once more for each of the others."""
    return sys.getrefcount(values[index])


COUNT_OF_UNSHARED = references([object()], 0)
"""What is counted of an object that only the list refers to."""

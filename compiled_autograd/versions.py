"""The version of this package; which versions of PyTorch it was tried on, and the refusal to run on any other.

The engine's capture seam is private and changes without notice: a version that was never tried could give a wrong
gradient instead of an error, so the range is closed on both ends. Where those inside it differ: ``torch_api/``.
"""

from __future__ import annotations

import re

VERSION = "0.2.0"
"""Of this package."""
TESTED_TORCH = ">=2.11,<2.16"
_LOWEST, _BEYOND = (2, 11), (2, 16)


class UnsupportedTorchError(ImportError):
    """The installed PyTorch lies outside the tested range."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"compiled_autograd was written against torch{TESTED_TORCH}, but torch {found} is installed. "
            f"Install a tested one: pip install 'torch{TESTED_TORCH}'."
        )


def release(version: str) -> tuple[int, int]:
    """``torch.__version__`` -> (2, 13), say; (0, 0) where it does not begin with two numbers."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (0, 0) if found is None else (int(found[1]), int(found[2]))


def check_torch(version: str) -> None:
    """Raise :class:`UnsupportedTorchError` unless ``version`` (``torch.__version__``) is in the tested range."""
    if not _LOWEST <= release(version) < _BEYOND:
        raise UnsupportedTorchError(version)

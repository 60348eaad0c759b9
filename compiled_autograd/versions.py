"""Which PyTorch this package was written against, and the refusal to run on any other.

The engine's capture seam is private and changes without notice: a version that was never tried could give a wrong
gradient instead of an error, so the range is closed on both ends.
"""

from __future__ import annotations

import re

TESTED_TORCH = ">=2.13,<2.14"
_LOWEST, _BEYOND = (2, 13), (2, 14)


class UnsupportedTorchError(ImportError):
    """The installed PyTorch lies outside the tested range."""

    def __init__(self, found: str) -> None:
        super().__init__(
            f"compiled_autograd was written against torch{TESTED_TORCH}, but torch {found} is installed. "
            f"Install a tested one: pip install 'torch{TESTED_TORCH}'."
        )


def check_torch(version: str) -> None:
    """Raise :class:`UnsupportedTorchError` unless ``version`` (``torch.__version__``) is in the tested range."""
    release = re.match(r"(\d+)\.(\d+)", version)
    if release is None or not _LOWEST <= (int(release[1]), int(release[2])) < _BEYOND:
        raise UnsupportedTorchError(version)

"""Small tapes beside eager: is the installation right, and does this PyTorch work?"""

from __future__ import annotations

from .checks import PartResult
from .running import NAMES, QUICK, as_they_come, run
from .table import as_json, heading, is_fine, line, sentence

__all__ = ["NAMES", "QUICK", "PartResult", "as_json", "as_they_come", "heading", "is_fine", "line", "run", "sentence"]

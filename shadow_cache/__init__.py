"""The shadow graph of captured tapes: what was seen, what was made for it, and why something was made again.

Nothing here imports torch: what a leaf holds is given by its user.
"""

from .graph import Key, Leaf, ShadowGraph, VariantKey, explain_variant
from .records import Bypass, Failure, Miss, unsupported

__all__ = [
    "Bypass",
    "Failure",
    "Key",
    "Leaf",
    "Miss",
    "ShadowGraph",
    "VariantKey",
    "explain_variant",
    "unsupported",
]

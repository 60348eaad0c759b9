"""The shadow graph of captured tapes: what was seen, what was made for it, and why something was made again.

Nothing here imports torch: what a leaf holds is given by its user.
"""

from .graph import Key, Leaf, ShadowGraph, VariantKey, explain_variant
from .records import Bypass, Failure, Miss, unsupported
from .watch import TooManyCompilesError, assert_max_compiles

__all__ = [
    "Bypass",
    "Failure",
    "Key",
    "Leaf",
    "Miss",
    "ShadowGraph",
    "TooManyCompilesError",
    "VariantKey",
    "assert_max_compiles",
    "explain_variant",
    "unsupported",
]

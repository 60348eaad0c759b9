"""Why a backward was no hit, in the user's terms; and how it is told.

:mod:`structure_misses` is asked where a structure is new, :mod:`variant_misses` where none of its variants serves
(``cache/graphs.py`` asks both); :mod:`bypass` has the reasons to stay with the eager engine.
"""

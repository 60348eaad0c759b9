"""Inductor's modes, named as ``torch.compile`` names them (torch 2.13).

What each means is ``torch._inductor.list_mode_options``; the names stand here too, so that a setting can be checked
without an import of Inductor. A backend in another mode than the default is another backend, with a name of its own:
that name tells its graphs, its artifacts and its entries in a store from those of other modes.
"""

from __future__ import annotations

from typing import Any

DEFAULT = "default"
MODES = (DEFAULT, "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
WITH_MODES = "inductor"
"""The one backend that has modes."""
CUDA_GRAPHS = "triton.cudagraphs"
"""The setting of Inductor's that has it replay CUDA graphs."""


def name_in(mode: str) -> str:
    """The name of Inductor's backend in a mode: ``inductor``, or ``inductor:max-autotune``."""
    return WITH_MODES if mode == DEFAULT else f"{WITH_MODES}:{mode}"


def options_of(mode: str) -> dict[str, Any]:
    """What the mode sets of Inductor's settings. Imports Inductor."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))

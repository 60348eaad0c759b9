"""Short names of dtypes, as PyTorch's own logs and graphs have them."""

from __future__ import annotations

import torch
from torch.utils._dtype_abbrs import dtype_abbrs


def short_name(dtype: torch.dtype) -> str:
    """``f32``, ``bf16``, ``i64``, ``b8``."""
    return dtype_abbrs.get(dtype, str(dtype).removeprefix("torch."))

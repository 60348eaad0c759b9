"""Small trainings of other people's libraries: a function for each, as the library's own documentation has the loop.

Models are tiny and their weights random, the data is made up, and nothing is downloaded. A function imports its library
itself, and draws whatever is random from the seeds that were set before it was called. Neither torch nor a library is
imported here.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.client_programs.training import Training


@dataclass(frozen=True)
class Program:
    """One of them: `function` in `file` of this folder; `distribution` is what `pip install` calls the library."""

    distribution: str
    file: str
    function: str

    def build(self) -> Training:
        """The training, ready for its first step; ImportError where the library is not installed."""
        module = importlib.import_module(f"{__name__}.{self.file}")
        return getattr(module, self.function)()


_FILES = {
    "plain": ("torch",),
    "language": (
        "transformers",
        "peft",
        "sentence-transformers",
        "x-transformers",
        "pytorch-crf",
        "entmax",
    ),
    "trainers": ("accelerate", "lightning", "pytorch-ignite", "skorch", "opacus"),
    "images": ("diffusers", "kornia", "monai", "pytorch-metric-learning"),
    "graphs": ("torch_geometric", "e3nn"),
    "physics": ("deepxde", "neuraloperator", "torchdiffeq", "torchsde"),
    "probability": ("gpytorch", "botorch", "pyro-ppl", "nflows", "normflows", "zuko"),
    "spiking": ("norse", "snntorch", "spikingjelly"),
    "optimization": ("geoopt", "higher", "torchopt", "pytorch_optimizer"),
    "attribution": ("captum", "backpack-for-pytorch", "transformer-lens", "nnsight"),
    "sequences": ("pytorch-forecasting", "pytorch-tcn", "stable-baselines3", "torchrl"),
}
PROGRAMS: dict[str, Program] = {
    distribution: Program(distribution, file, f"train_{distribution.replace('-', '_')}")
    for file, distributions in _FILES.items()
    for distribution in distributions
}
"""Each program by the distribution that it needs."""

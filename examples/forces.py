"""An energy model whose forces are a gradient, trained on energies and on forces.

F = -dE/dr is a gradient, and a loss of F is differentiated through it. Eager PyTorch can do that; so can this package,
which compiles the last backward, from the loss through the forces and the energy to the weights. A model that
torch.compile compiled cannot be trained so: the last line shows what it says. (It can where model, forces and loss are
one compiled function, with torch._dynamo.config.trace_autograd_ops, which is off by default.)

    python examples/forces.py
"""

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import compiled_autograd as ca

STEPS, BATCH, ATOMS = 150, 128, 8
Seconds = tuple[float, float]


def distances(positions: Tensor) -> Tensor:
    """[batch, atoms, 3] -> [batch, pairs, 1]: the distance of each pair of atoms."""
    first, second = torch.triu_indices(ATOMS, ATOMS, offset=1)
    return (positions[:, first] - positions[:, second]).norm(dim=-1, keepdim=True)


class PairEnergy(nn.Module):
    """A network of each pair's distance, summed over the pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Buffer(torch.linspace(0.5, 4, 24))
        self.network = nn.Sequential(nn.Linear(24, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 1))

    def forward(self, positions: Tensor) -> Tensor:
        """[batch, atoms, 3] -> energies [batch]."""
        features = torch.exp(-10 * (distances(positions) - self.centres).square())
        return self.network(features).sum(dim=(1, 2))


def morse(positions: Tensor) -> Tensor:
    """The true energies [batch] of atoms at `positions` [batch, atoms, 3]: Morse's potential for each pair."""
    return (1 - torch.exp(1.2 - distances(positions))).square().sum(dim=(1, 2))


def with_forces(energy_of: Callable[[Tensor], Tensor], positions: Tensor) -> tuple[Tensor, Tensor]:
    """Energies [batch] and forces [batch, atoms, 3], both with the history that training needs."""
    energy = energy_of(positions)
    return energy, -torch.autograd.grad(energy.sum(), positions, create_graph=True)[0]


def gradients(model: Any, positions: Tensor, around: AbstractContextManager[Any]) -> tuple[Seconds, list[Tensor]]:
    """Seconds of the whole and of the last backward, and the gradients of the loss, which are left in `.grad` too."""
    true_energy, true_forces = (each.detach() for each in with_forces(morse, positions))
    model.zero_grad()
    started = time.perf_counter()
    with around:
        energy, forces = with_forces(model, positions)
        loss = F.mse_loss(energy, true_energy) + 10 * F.mse_loss(forces, true_forces)
        before = time.perf_counter()
        loss.backward(inputs=list(model.parameters()))  # not by the positions
    seconds = time.perf_counter() - started, time.perf_counter() - before
    return seconds, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def batch() -> Tensor:
    """Positions [batch, atoms, 3] that require grad: two by two by two atoms near a lattice."""
    lattice = 1.3 * torch.cartesian_prod(torch.arange(2.0), torch.arange(2.0), torch.arange(2.0))
    return (lattice + 0.2 * torch.randn(BATCH, ATOMS, 3)).requires_grad_()


def force_error(model: nn.Module) -> float:
    """Root of the mean square of the forces' error, over that of the true forces."""
    positions = batch()
    (_, found), (_, true) = with_forces(model, positions), with_forces(morse, positions)
    return ((found - true).square().mean() / true.square().mean()).sqrt().item()


def main() -> None:
    """Train on the compiled gradients, and compare them with eager's at every step; then try torch.compile."""
    torch.manual_seed(0)
    model = PairEnergy()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    # For exact counts: each new structure is compiled at once, and nothing is left to eager to be timed.
    session = ca.enable(on_miss="compile", compile_budget=float("inf"), cache_dir=False, tune=False)
    times: dict[str, list[Seconds]] = {"eager": [], "compiled": []}
    found: dict[str, list[Tensor]] = {}
    before = force_error(model)
    for _ in range(STEPS):
        positions = batch()
        for way, around in (("eager", ca.disable()), ("compiled", session)):
            seconds, found[way] = gradients(model, positions, around)
            times[way].append(seconds)
        torch.testing.assert_close(found["compiled"], found["eager"], rtol=1e-3, atol=1e-3)
        optimizer.step()  # with the compiled gradients: they are the ones that stand in .grad
    after = force_error(model)
    assert after < 0.5 * before
    print(f"error of the forces: {before:.2f} before, {after:.2f} after {STEPS} steps")
    stats = session.stats()
    assert (stats.structure_misses, stats.hits, stats.compiles) == (1, STEPS - 1, 1)
    assert stats.bypasses == {"create_graph": STEPS}  # the gradient that the forces are
    print(f"backwards of the loss: 1 compiled in {stats.compile_seconds:.1f} s, {stats.hits} hits")
    eager, ours = ([statistics.median(each) for each in zip(*times[way][3:], strict=True)] for way in times)
    print(f"time over eager's: last backward {ours[1] / eager[1]:.2f}, the whole {ours[0] / eager[0]:.2f}")
    # "aot_eager" is AOTAutograd without Inductor: it is there that the second derivative is missing.
    try:
        gradients(torch.compile(model, backend="aot_eager"), batch(), ca.disable())
        raise AssertionError("the docstring is no longer true: this torch.compile differentiates twice")
    except RuntimeError as refusal:
        assert "double backward" in str(refusal)
        print(f"torch.compile(model): {refusal}")


if __name__ == "__main__":
    main()

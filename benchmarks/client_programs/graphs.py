"""Models of graphs and of points in space."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.client_programs.training import Training

NODES, EDGES = 200, 800


def train_torch_geometric() -> Training:
    """Nodes of one graph are classified."""
    from torch_geometric.nn import GATConv, GCNConv

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = GCNConv(16, 32), GATConv(32, 7, heads=2, concat=False)

        def forward(self, x: Tensor, edges: Tensor) -> Tensor:
            hidden = nn.functional.dropout(self.first(x, edges).relu(), training=self.training)
            return nn.functional.log_softmax(self.second(hidden, edges), dim=1)

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    x, edges, target = torch.randn(NODES, 16), torch.randint(NODES, (2, EDGES)), torch.randint(7, (NODES,))
    known = torch.rand(NODES) < 0.5

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.nll_loss(model(x, edges)[known], target[known])
        loss.backward()
        optimizer.step()
        return loss

    return Training(step, lambda: [*model.parameters()])


def train_e3nn() -> Training:
    """A layer that turns with its input: its tensor product is code that the library writes."""
    from e3nn import o3
    from e3nn.math import soft_one_hot_linspace
    from e3nn.nn import FullyConnectedNet

    fields, harmonics = o3.Irreps("8x0e + 4x1o"), o3.Irreps.spherical_harmonics(2)
    product = o3.FullyConnectedTensorProduct(fields, harmonics, fields, shared_weights=False)
    weights = FullyConnectedNet([10, 16, product.weight_numel], torch.relu)
    model = nn.ModuleList([product, weights])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    positions, features = torch.randn(16, 3), fields.randn(16, -1)
    source, end = torch.randint(16, (2, 64))
    target = torch.randn(16, fields.dim)

    def step() -> Tensor:
        optimizer.zero_grad()
        apart = positions[end] - positions[source]
        angles = o3.spherical_harmonics(harmonics, apart, normalize=True, normalization="component")
        lengths = soft_one_hot_linspace(apart.norm(dim=1), 0.0, 3.0, 10, basis="smooth_finite", cutoff=True)
        messages = product(features[source], angles, weights(lengths))
        loss = (torch.zeros(16, fields.dim).index_add(0, end, messages) - target).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return Training(step, lambda: [*model.parameters()])

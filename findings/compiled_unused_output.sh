#!/usr/bin/env bash
# torch 2.13.0: under torch.compile, an output that the loss does not use changes gradients and what AdamW does.
#
# Expected: a model returns a loss and a value for the log. Only the loss is differentiated, so the other value has no
# influence on gradients, compiled or not.
# Seen: compiled code gets zeros as the gradient of the unused output and computes its whole backward. (1) Where its
# derivative is infinite, as that of a square root at zero, 0 * inf makes the gradient NaN. (2) A head that the loss
# does not use has the gradient 0 instead of None, so AdamW decays its weights, where eager leaves them alone.
# The superfluous work is known: https://github.com/pytorch/pytorch/issues/131794
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy
cat > program.py <<'PROGRAM'
import torch
from torch import nn


def compiled(function):
    return torch.compile(function, backend="aot_eager")


def with_a_value_to_log(weight):
    residual = weight - 1
    return residual.square().sum() + weight.sum(), residual.square().sum().sqrt()


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x):
        return self.used(x), self.unused(x)


def gradient(way):
    weight = torch.ones(2, requires_grad=True)
    loss, _ = way(with_a_value_to_log)(weight)
    loss.backward()
    return weight.grad


def shrinks(way):
    model = TwoHeads()
    before = model.unused.weight.detach().clone()
    way(model)(torch.ones(1, 2))[0].sum().backward()
    torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5).step()
    return (model.unused.weight / before).mean().item()


print("torch", torch.__version__)
ways = {"eager": lambda function: function, "compiled": compiled}
for name, way in ways.items():
    print(f"{name}: gradient {gradient(way).tolist()}, unused head multiplied by {shrinks(way):.2f}")
assert gradient(ways["eager"]).tolist() == [1, 1] and gradient(compiled).isnan().all()
assert shrinks(ways["eager"]) == 1 and abs(shrinks(compiled) - 0.95) < 1e-3
PROGRAM
venv/bin/python program.py

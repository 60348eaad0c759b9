#!/usr/bin/env bash
# torch 2.13.0: with set_swap_module_params_on_conversion(True), load_state_dict and .to() lose the parameters' hooks.
#
# Expected: the setting exists so that parameters stay the same objects, and optimizers and other references stay valid.
# So the hooks of a parameter stay on it too, as they do without the setting.
# Seen: swap_tensors exchanges the tensors below the Python objects. Hooks of register_hook and of
# register_post_accumulate_grad_hook go away with the old tensor, which is freed. The parameter is the same object, but
# a program that clips gradients or steps its optimizer in such hooks trains on without them, and nothing is raised.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy
cat > program.py <<'PROGRAM'
import torch
from torch import nn


def called(change, swap):
    torch.__future__.set_swap_module_params_on_conversion(swap)
    model, calls = nn.Linear(2, 1), []
    weight = model.weight
    weight.register_hook(lambda _: calls.append("register_hook"))
    weight.register_post_accumulate_grad_hook(lambda _: calls.append("post-accumulate"))
    change(model)
    assert model.weight is weight
    model(torch.ones(1, 2, dtype=weight.dtype)).sum().backward()
    assert weight.grad is not None
    return calls


changes = {
    "load_state_dict": lambda model: model.load_state_dict(nn.Linear(2, 1).state_dict()),
    "to(torch.float64)": lambda model: model.to(torch.float64),
}
print("torch", torch.__version__)
for name, change in changes.items():
    found = {swap: called(change, swap) for swap in (False, True)}
    for swap, calls in found.items():
        print(f"{name}, swap {swap}: called {calls}")
    assert found == {False: ["register_hook", "post-accumulate"], True: []}, found
PROGRAM
venv/bin/python program.py

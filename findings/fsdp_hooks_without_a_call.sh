#!/usr/bin/env bash
# torch 2.13.0: hooks on the parameters of a fully_shard model are not called, and no error says so.
#
# Expected: Tensor.register_hook on a parameter changes its gradient, as in a model that is not sharded. Programs clip
# or mask gradients in this way, for example to keep some rows of an embedding fixed.
# Seen: fully_shard computes with other tensors and assigns .grad itself. Hooks of register_hook are never called, so
# the gradient stays whole. Hooks of register_post_accumulate_grad_hook are called if they were registered after
# fully_shard, and are lost if they were registered before. Nothing is warned of. Torch 2.14.1 does the same.
# Known for register_hook: https://github.com/meta-pytorch/torchrec/pull/4268
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy
cat > program.py <<'PROGRAM'
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())


def train(*order):
    model, called = nn.Linear(2, 1, bias=False), []

    def register():
        model.weight.register_hook(lambda grad: called.append("register_hook") or grad * 0)
        model.weight.register_post_accumulate_grad_hook(lambda _: called.append("post-accumulate"))

    for step in order:
        register() if step == "hooks" else fully_shard(model)
    model(torch.ones(1, 2)).sum().backward()
    grad = model.weight.grad
    return called, (grad.full_tensor() if "shard" in order else grad).tolist()


print("torch", torch.__version__)
found = [train(*order) for order in (["hooks"], ["hooks", "shard"], ["shard", "hooks"])]
distributed.destroy_process_group()
for name, (called, grad) in zip(("not sharded", "hooks before fully_shard", "hooks after fully_shard"), found):
    print(f"{name}: called {called}, gradient {grad}")
assert found == [
    (["register_hook", "post-accumulate"], [[0, 0]]),
    ([], [[1, 1]]),
    (["post-accumulate"], [[1, 1]]),
], found
PROGRAM
venv/bin/python -W ignore program.py

#!/usr/bin/env bash
# torch 2.15.0: under fully_shard, the sum of a parameter's gradients depends on whether gradients are synchronised.
#
# Expected: with reduce_dtype=torch.float32, a parameter that is used three times gets the same gradient with and without
# set_requires_gradient_sync(False): communication is put off, and the local sum is the same.
# Seen: with synchronisation, a hook of fully_shard sets grad_dtype of the parameter to None in the midst of the
# backward, so the terms are added in bfloat16: 256 + 1 + 1 is 256. Without it the terms are cast to float32 first, and
# the sum is 258. On torch 2.14.1 both are 256.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.15.0 numpy
cat > program.py <<'PROGRAM'
import torch
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class UsedThreeTimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x[0] * self.scale + x[1] * self.scale + x[2] * self.scale


print("torch", torch.__version__)
distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
x = torch.tensor([1.0, 1.0, 256.0])
found = {}
for sync in (True, False):
    model = fully_shard(UsedThreeTimes(), mp_policy=policy)
    model.set_requires_gradient_sync(sync)
    model(x).float().sum().backward()
    if not sync:  # a second backward, whose gradient is zero, synchronises
        model.set_requires_gradient_sync(True)
        model(torch.zeros(3)).float().sum().backward()
    found[sync] = model.scale.grad.full_tensor().item()
    print(f"synchronised in the first backward: {sync}; gradient {found[sync]:g}")
distributed.destroy_process_group()
assert found == {True: 256, False: 258}, found
PROGRAM
venv/bin/python -W ignore program.py

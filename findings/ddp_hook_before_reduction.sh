#!/usr/bin/env bash
# torch 2.13.0: under DistributedDataParallel, an optimizer that steps in post-accumulate hooks sees one rank's gradient.
#
# Expected: the recipe that fuses the optimizer into the backward works under DDP as it does in one process. (A hook of
# register_post_accumulate_grad_hook steps and frees .grad.) The gradient is the average of all ranks, and all ranks keep
# the same weights.
# Seen: DDP averages in a hook that the engine calls after these hooks. The hook sees the gradient of its own rank, and
# the weights of the ranks drift apart. Nothing is raised, and DDP compares no weights later.
# Known: https://github.com/kohya-ss/musubi-tuner/issues/679
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy
cat > program.py <<'PROGRAM'
import sys

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel


def train(rank, in_hook):
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)

    def step(_):
        optimizer.step()
        optimizer.zero_grad()

    if in_hook:
        model.module.weight.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        model(torch.full((1, 1), rank + 1.0)).sum().backward()  # the gradient is 1 on rank 0 and 2 on rank 1
        if not in_hook:
            step(None)
    weights = [torch.empty(1, 1) for _ in range(2)]
    distributed.all_gather(weights, model.module.weight.detach())
    return torch.cat(weights).flatten().tolist()


def main(rank):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{sys.argv[1]}")
    after, in_hook = train(rank, False), train(rank, True)
    if rank == 0:
        print("a step after the backward: weights of the two ranks", after)
        print("a step in hooks:           weights of the two ranks", in_hook)
    distributed.destroy_process_group()
    assert after == [0.625, 0.625] and in_hook == [0.75, 0.5], (after, in_hook)


if __name__ == "__main__":
    print("torch", torch.__version__, flush=True)
    torch.multiprocessing.start_processes(main, nprocs=2, start_method="fork")
PROGRAM
venv/bin/python -W ignore program.py "$folder/rendezvous"

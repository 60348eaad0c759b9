#!/usr/bin/env bash
# torch 2.13.0: SGD(fused=True) takes unwritten memory for its momentum if GradScaler skips the first step.
#
# Expected: a step that GradScaler skips, because a gradient is infinite, leaves no trace in the optimizer. GradScaler
# begins with a scale of 65,536, at which gradients of float16 may be infinite.
# Seen: the fused optimizer allocates its momentum with torch.empty_like, and the kernel returns without a write. At the
# next step the momentum is no longer new, so the unwritten memory enters the parameters. They may become huge or
# NaN. Here PyTorch fills new memory with NaN, to give the same result each
# time. The other implementations of SGD and the fused Adam are right. Torch 2.14.1 and 2.15.0 do the same.
# Known for CUDA: https://github.com/LibreYOLO/libreyolo/pull/771
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy
cat > program.py <<'PROGRAM'
import torch

torch.use_deterministic_algorithms(True)  # fills new memory with NaN


def train(kind, **settings):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = kind([weight], lr=0.1, **settings)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for factor in (float("inf"), 1.0, 1.0):  # the first step overflows
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    return weight


print("torch", torch.__version__)
found = {
    "SGD, for-loop": train(torch.optim.SGD, momentum=0.9, foreach=False),
    "SGD, foreach": train(torch.optim.SGD, momentum=0.9, foreach=True),
    "SGD, fused": train(torch.optim.SGD, momentum=0.9, fused=True),
    "Adam, fused": train(torch.optim.Adam, fused=True),
}
for name, weight in found.items():
    print(f"{name}: {weight.tolist()}")
wrong = [name for name, weight in found.items() if not weight.isfinite().all()]
assert torch.equal(found["SGD, for-loop"], found["SGD, foreach"]) and wrong == ["SGD, fused"], wrong
PROGRAM
venv/bin/python program.py

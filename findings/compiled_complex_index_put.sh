#!/usr/bin/env bash
# torch 2.14.1: torch.compile gives wrong numbers for index_put of complex tensors whose target is read afterwards.
#
# Expected: index_put is out of place: the tensor that it is given keeps its values, compiled or not.
# Seen: code that Inductor compiles for the CPU writes into that tensor, and what reads it afterwards sees the written
# values. Nothing is raised or warned of. The same program with real numbers is right, and so is the complex one on
# torch 2.13.0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export TORCHINDUCTOR_CACHE_DIR="$folder/inductor"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.14.1 numpy
cat > program.py <<'PROGRAM'
import torch


def two_writes(x):
    rows = torch.zeros(2, dtype=torch.int64)
    square = x.view(3, 3) * 2
    one = torch.as_strided_scatter(square, square[0], [3], [1], 3)
    both = one.index_put((rows,), square[1:3], accumulate=True)
    return as_real(both) + as_real(one)


def as_real(x):
    return torch.view_as_real(x) if x.is_complex() else x.clone()


print("torch", torch.__version__)
errors = {}
for dtype in (torch.float64, torch.complex128):
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.randn(9, dtype=dtype)
    errors[dtype] = (torch.compile(two_writes)(x) - two_writes(x)).abs().max().item()
    print(f"{dtype}: compiled and eager differ by {errors[dtype]:.3g}")
assert errors[torch.float64] < 1e-12 and errors[torch.complex128] > 0.1, errors
PROGRAM
venv/bin/python program.py

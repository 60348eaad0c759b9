#!/usr/bin/env bash
# torch 2.14.1: zeros in the place of an undefined gradient do not have the dtype that ctx.set_output_grad_dtype declares.
#
# Expected: the documentation of set_output_grad_dtype says that the engine guarantees the declared dtype for the
# gradient that backward receives.
# Seen: a gradient that is undefined, because the function after it returned None, arrives as zeros in the dtype of the
# forward's output. A backward that counts on float32 computes in bfloat16 in just that case.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.14.1 numpy
cat > program.py <<'PROGRAM'
import torch

seen = []


class Narrowed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_output_grad_dtype(torch.float32)
        return x.to(torch.bfloat16)

    @staticmethod
    def backward(ctx, gradient):
        seen.append(str(gradient.dtype))
        return gradient.float()


class Stopped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


x = torch.ones(3, requires_grad=True)
Narrowed.apply(x).float().sum().backward()
Stopped.apply(Narrowed.apply(x)).float().sum().backward()
print("torch", torch.__version__)
print("a gradient that is there:    ", seen[0], "(declared: torch.float32)")
print("one that is undefined, zeros:", seen[1], "(declared: torch.float32)")
assert seen == ["torch.float32", "torch.bfloat16"], seen
PROGRAM
venv/bin/python program.py

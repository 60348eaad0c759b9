#!/usr/bin/env bash
# torch 2.13.0: while one thread traces with torch.fx, a forward in another thread raises NameError.
#
# Expected: a trace concerns the thread that makes it: another thread goes on calling its own models.
# Seen: fx.Tracer.trace replaces __call__ and __getattr__ of torch.nn.Module for the whole process. A call of any module
# in another thread then goes to that tracer, which does not know the module: "module is not installed as a submodule".
# Inductor makes such a trace as it compiles, so a model that is called beside a compile in another thread may fail.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy
cat > program.py <<'PROGRAM'
import threading

import torch
from torch import fx, nn

tracing, go_on = threading.Event(), threading.Event()


class Slow(nn.Module):
    def forward(self, x):
        tracing.set()
        go_on.wait(60)
        return x.relu()


print("torch", torch.__version__)
model, x = nn.Linear(3, 3), torch.randn(2, 3)
thread = threading.Thread(target=fx.symbolic_trace, args=(Slow(),))
thread.start()
assert tracing.wait(60)
error = None
try:
    model(x)
except NameError as raised:
    error = raised
go_on.set()
thread.join()
print("a forward in another thread, meanwhile:", repr(error))
assert error is not None and "not installed as a submodule" in str(error)
model(x)  # afterwards it works
PROGRAM
venv/bin/python program.py

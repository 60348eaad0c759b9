#!/usr/bin/env bash
# torch 2.13.0: torch.set_num_threads in one thread changes the number of threads that were not started yet, and of no
# other that runs.
#
# Expected: "Sets the number of threads used for intraop parallelism on CPU" (torch.set_num_threads): for the process, or
# for the thread that calls it.
# Seen: neither. Threads that have asked for the number before keep theirs, the main thread among them, and threads that
# start later have the new one. DataLoader(pin_memory=True) calls it with 1 in a thread of the process that trains
# (torch/utils/data/_utils/pin_memory.py), so that what is computed in later threads has one core.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy
cat > program.py <<'PROGRAM'
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

print("torch", torch.__version__)
torch.set_num_threads(2)
assert torch.get_num_threads() == 2
earlier = ThreadPoolExecutor(1)
assert earlier.submit(torch.get_num_threads).result() == 2

other = threading.Thread(target=torch.set_num_threads, args=(1,))
other.start()
other.join()

found = {
    "the main thread": torch.get_num_threads(),
    "a thread that began before": earlier.submit(torch.get_num_threads).result(),
    "a thread that begins after": ThreadPoolExecutor(1).submit(torch.get_num_threads).result(),
}
for who, number in found.items():
    print(f"{who}: {number}")
assert list(found.values()) == [2, 2, 1], found
PROGRAM
venv/bin/python program.py

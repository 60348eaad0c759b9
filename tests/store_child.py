"""Processes that use one store and are killed, run as a script: without torch, so that a fork costs a millisecond.

    store_child.py kill FOLDER TRIALS SEED     one writer at a time, killed in the middle
    store_child.py many FOLDER SECONDS SEED    eight at once, killed and replaced at random

Each child says in a pipe what ``add`` has returned for. In the end all of that must be there, byte for byte. What was
done is printed as JSON; any mistake ends it with an assertion.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import msgspec
from store_entries import made, stored

import shadow_cache
from shadow_cache import MissEntry, Store

SIZE = 20_000
SECOND = 1 << 30  # from here on, ids under which entries are stored a second time, to be removed again


def check_reads(store: Store, structure: str) -> None:
    """What is found is what was stored."""
    for entry in store.find(structure):
        if int(entry.id, 16) >= SECOND:
            continue
        _, expected, files = made(int(entry.id, 16), SIZE)
        assert stored(entry) == expected
        for digest, data in files.items():
            assert store.read(digest) == data


def fork(work: Callable[..., None], *arguments: Any) -> tuple[int, int]:
    """A child that calls ``work(pipe, *arguments)``: its id, and the end of the pipe to read from."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reader)
            work(writer, *arguments)
            code = 0
        except BaseException:  # noqa: BLE001  # the process ends here: whatever it was is shown
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    return pid, reader


def told(reader: int) -> list[int]:
    """All that a dead child said: complete lines only."""
    data = b""
    while part := os.read(reader, 65536):
        data += part
    os.close(reader)
    return [int(line) for line in data.split(b"\n")[:-1]]


def write_on(pipe: int, folder: str, first: int) -> None:
    os.write(pipe, b"-1\n")
    store = shadow_cache.open(folder)
    for number in range(first, first + 1000):
        store.add(*made(number, SIZE))
        os.write(pipe, b"%d\n" % number)


def kill(folder: str, trials: int, seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    stored_ = 0
    for first in range(0, trials, 50):  # a new folder now and then: what all trials store would have to be checked
        stored_ += kill_in(f"{folder}/{first}", min(50, trials - first), rng)
    return {"trials": trials, "stored": stored_}


def kill_in(folder: str, trials: int, rng: random.Random) -> int:
    reported: set[int] = set()
    for trial in range(trials):
        pid, reader = fork(write_on, folder, trial * 1000)
        select.select([reader], [], [], 60)  # until it begins to open the store
        time.sleep(rng.uniform(0, 0.12))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        numbers = [number for number in told(reader) if number >= 0]
        reported |= set(numbers)
        with shadow_cache.open(folder) as store:
            present = {int(entry.id, 16) for entry in store.entries()}
            assert reported <= present, f"lost {reported - present}"
            for number in numbers[-3:]:
                for digest, data in made(number, SIZE)[2].items():
                    assert store.read(digest) == data
            # What it was at when it was killed can be stored by the next one.
            unfinished = numbers[-1] + 1 if numbers else trial * 1000
            store.add(*made(unfinished, SIZE))
            reported.add(unfinished)
    check(folder, reported)
    return len(reported)


def check(folder: str, reported: set[int]) -> None:
    with shadow_cache.open(folder) as store:
        entries = {int(entry.id, 16): entry for entry in store.entries()}
        assert reported <= set(entries), f"lost {reported - set(entries)}"
        for number, entry in entries.items():
            _, expected, files = made(number, SIZE)
            assert stored(entry) == expected
            for digest, data in files.items():
                assert store.read(digest) == data
        assert not store.damage and not [miss for miss in store.misses() if miss.miss.kind == "corrupt"]
        assert store.verify() == ()


def work_on(pipe: int, folder: str, first: int, seed: int) -> None:
    rng = random.Random(seed)
    store = shadow_cache.open(folder)
    number = first
    while True:
        what = rng.random()
        structure, entry, files = made(number, SIZE)
        if what < 0.4:
            store.add(structure, entry, files)
            os.write(pipe, b"%d\n" % number)
            number += 1
        elif what < 0.7:
            check_reads(store, structure.id)
        elif what < 0.8:
            store.loaded(f"{rng.randrange(first, number + 1):06x}")
        elif what < 0.9:
            store.record(MissEntry(time.time(), structure.id, entry.id, entry.name, entry.miss))
        else:
            # Added and removed again, with files that others have too: those must stay.
            second = f"{SECOND + first:06x}"
            shared = made(number - 1 if number > first else first, SIZE)
            store.add(shared[0], msgspec.structs.replace(shared[1], id=second), shared[2])
            store.remove([second])


def many(folder: str, seconds: int, seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    running: list[tuple[int, int]] = []
    reported: set[int] = set()
    started = killed = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end or running:
        while len(running) < 8 and time.monotonic() < end:
            running.append(fork(work_on, folder, started * 1000, rng.random()))
            started += 1
        time.sleep(rng.uniform(0, 0.05))
        pid, reader = running.pop(rng.randrange(len(running)))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), "a child ended by itself: its error is above"
        killed += 1
        reported |= set(told(reader))
    return {"killed": killed, "stored": len(reported), "left": finish(folder, reported)}


def finish(folder: str, reported: set[int]) -> int:
    """What other children added under a second id may be left where they were killed between adding and removing."""
    with shadow_cache.open(folder) as store:
        second = [entry.id for entry in store.entries() if int(entry.id, 16) >= SECOND]
        store.remove(second)
    check(folder, reported)
    return len(second)


if __name__ == "__main__":
    assert "torch" not in sys.modules
    what, place, amount, seed = sys.argv[1:]
    print(json.dumps({"kill": kill, "many": many}[what](place, int(amount), int(seed))))  # noqa: T201

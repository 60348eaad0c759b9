"""Records as a cache holds them, the same at each run: three tapes, four entries, and a miss of each kind."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest

from shadow_cache.entries import Call, Entry, Input, MissEntry, Region, Structure, Timing
from shadow_cache.records import Miss
from shadow_cache.store import Store

NOW = 1_750_000_000.0
MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0

TEXT = """tape graph: 11 nodes, 9 tensors
  input_0: float32 cpu
#0 GraphRoot
  %0 = ops.validate_outputs([input_0], [[[None, None, cpu, 6, 0, None], [], False, 6]])
  return []
"""
ATEN = """def forward(self, arg0, arg1):
    mm = torch.ops.aten.mm.default(arg0, arg1)
    return [mm]
"""


def _calls(loss: str, weight_grad: str) -> tuple[Call, ...]:
    return (
        Call("GraphRoot", ("GraphRoot", "input_0: float32 cpu"), edges=(1,)),
        Call(loss, (loss, f"%2 = ops.{loss}([%1], [True], size_0)"), source="train.py:40 in step", edges=(2,)),
        Call("AddmmBackward0", ("AddmmBackward0", "%6 = ops.AddmmBackward0([%5], 1, 1)"), edges=(10, 5, 3)),
        Call("TBackward0", ("TBackward0", "%15 = ops.TBackward0([%13])"), edges=(4,)),
        Call("AccumulateGrad", ("AccumulateGrad", weight_grad), "2.weight"),
        Call(
            "TanhBackward0", ("TanhBackward0", "%20 = ops.TanhBackward0([%12])"), None, "model.py:12 in forward", (6,)
        ),
        Call("AddmmBackward0", ("AddmmBackward0", "%24 = ops.AddmmBackward0([%23], 1, 1)"), edges=(9, 7)),
        Call("TBackward0", ("TBackward0", "%32 = ops.TBackward0([%30])"), edges=(8,)),
        Call("AccumulateGrad", ("AccumulateGrad", "%36 = accumulate_grad(input_6, None, %35)"), "0.weight"),
        Call("AccumulateGrad", ("AccumulateGrad", "%31 = accumulate_grad(input_7, None, %29)"), "0.bias"),
        Call("AccumulateGrad", ("AccumulateGrad", "%14 = accumulate_grad(input_8, None, %11)"), "2.bias"),
    )


_END = ("end", "accumulates=True", "return []")
_FRESH = "%19 = accumulate_grad(input_3, None, %18)"
_ADDED = "%19 = accumulate_grad(input_3, input_4, %18)"
MEAN = Structure("5e1fab90c2d4", _calls("MeanBackward0", _FRESH), _END, TEXT)
MEAN_ADDED = Structure("5e77d01a9b3c", _calls("MeanBackward0", _ADDED), _END, TEXT)
MSE = Structure("c04d5e6f7a81", _calls("MseLossBackward0", _FRESH), _END, TEXT)
STRUCTURES = (MEAN, MEAN_ADDED, MSE)

ENVIRONMENT = {"python": "3.12.3", "torch": "2.13.0", "cpu": "AMD EPYC, avx2", "compiler": "g++ 13.2.0"}
AMBIENT = {"autocast": "None", "deterministic": "False", "default_dtype": "torch.float32", "threads": "2"}
SIZES = {"3fa91c": 3_200_000, "3fb07e": 3_100_000, "81c0d2": 4_812, "e2a944": 1_900_000}


def artifact(name: str) -> bytes:
    """Stands for compiled code; as many bytes as its entry is to have, with its ATen graph."""
    return (f"{name} " * (SIZES[name] // 7 + 1)).encode()[: SIZES[name] - len(ATEN)]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _inputs(batch: str) -> tuple[Input, ...]:
    return (
        Input("node 2 AddmmBackward0, mat1", "float32", "cpu", (batch, "3")),
        Input("node 6 AddmmBackward0, mat1", "float32", "cpu", (batch, "4")),
    )


def _entry(id: str, structure: Structure, source: str, batch: str, miss: Miss, **more: Any) -> Entry:
    values = {
        "settings": {"backend": "inductor", "passes": "()"},
        "dynamic": False,
        "guards": (),
        "seconds": 17.3,
        "created": NOW - 2 * HOUR,
        "last_used": NOW - 5 * MINUTE,
        "loads": 12,
        **more,
    }
    region = Region(9, digest(artifact(id)), digest(ATEN.encode()), b"fed so")
    return Entry(
        id=id,
        structure=structure.id,
        loss=structure.calls[1].name,
        module="Sequential",
        source=source,
        nodes=len(structure.calls),
        ambient=AMBIENT,
        environment=ENVIRONMENT,
        inputs=_inputs(batch),
        record=b"serves this",
        regions=(region,),
        miss=miss,
        size=SIZES[id],
        **values,
    )


BATCH = Miss("shape", "node 2 AddmmBackward0, mat1, dim 0", "32", "48", "dim 0 is dynamic from now on", 19.84, 2)
GRAD = Miss("grad_state", "node 4 AccumulateGrad", "None", "Tensor", "call zero_grad() before each backward", 0.231, 4)
FIRST = _entry("3fa91c", MEAN, "train.py:41 in step", "32", Miss("first_seen", seconds=17.3))
DYNAMIC = _entry(
    *("3fb07e", MEAN, "train.py:41 in step", "s0", BATCH),
    dynamic=True,
    guards=("s0 > 1", "s0 <= 4096"),
    seconds=19.84,
    created=NOW - HOUR,
    loads=3,
    timing=Timing(0.62, 0.41, 7, NOW - 50 * MINUTE, "compiled"),
)
ADDED = _entry(
    *("81c0d2", MEAN_ADDED, "train.py:58 in accumulate", "32", GRAD),
    settings={"backend": "eager", "passes": "()"},
    seconds=0.231,
    created=NOW - 40 * DAY,
    last_used=NOW - 40 * DAY,
    loads=0,
    timing=Timing(0.18, 0.31, 7, NOW - 40 * DAY, "eager"),
)
MSE_ENTRY = _entry(
    *("e2a944", MSE, "evaluate.py:9 in main", "32"),
    Miss("new_node", "node 1", "MeanBackward0", "MseLossBackward0", node=1),
    seconds=121.0,
    created=NOW - 3 * DAY,
    last_used=NOW - 3 * DAY,
    loads=1,
)
ENTRIES = (FIRST, DYNAMIC, ADDED, MSE_ENTRY)

MISSES = {
    "first_seen": Miss("first_seen", seconds=17.3),
    "new_node": Miss("new_node", "node 5", "ReluBackward0", "TanhBackward0", "", 17.9, 5),
    "node_attribute": Miss(
        "node_attribute", "node 5 TanhBackward0", "[True], 2", "[True], 3", "the exponent is a constant", 17.2, 5
    ),
    "grad_state": GRAD,
    "hooks_changed": Miss("hooks_changed", "node 4 AccumulateGrad", "", "tensor_hook", "", 15.5, 4),
    "undefined_gradients": Miss(
        "undefined_gradients", "node 2 AddmmBackward0", "[defined, None]", "[defined, defined]", node=2
    ),
    "shape": BATCH,
    "dtype": Miss("dtype", "node 2 AddmmBackward0, mat1", "float32", "bfloat16", "", 14.0, 2),
    "device": Miss("device", "node 2 AddmmBackward0, mat1", "cpu", "cuda:0", "", 31.0, 2),
    "layout": Miss("layout", "node 2 AddmmBackward0, mat1", "strides (3, 1)", "strides (1, 32)", "", 17.0, 2),
    "guard": Miss("guard", "s0 > 1", "s0 = 48", "s0 = 1", "size 1 is always compiled by itself", 16.6),
    "variant_limit": Miss("variant_limit", "structure 5e1fab90c2d4", "8 variants", "a ninth", "set dynamic=True"),
    "ambient_state": Miss("ambient_state", "autocast", "None", "(('cpu', 'torch.bfloat16'),)", "", 18.2),
    "backend_or_settings": Miss("backend_or_settings", "backend", "inductor", "eager", "", 0.231),
    "environment": Miss("environment", "torch", "2.13.0", "2.13.1", "", 17.7),
    "evicted": Miss("evicted", "entry 77aa01", "", "", "raise the limit of 1.0 GB", 17.5),
    "corrupt": Miss("corrupt", "files/ab/ab12", "3200000 bytes", "0 bytes", "", 17.4),
    "mismatch": Miss(
        "mismatch", "0.weight", "the results of the real calls", "1e-2 off", "the calls run one by one", 0.1
    ),
}


def missed(miss: Miss, entry: Entry | None = DYNAMIC, when: float = NOW - 3 * MINUTE) -> MissEntry:
    """As the store keeps it, for the tape of ``FIRST``."""
    return MissEntry(when, MEAN.id, entry.id if entry else None, FIRST.name, miss)


def fill(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add all of it at the times that the records say."""
    by_id = {structure.id: structure for structure in STRUCTURES}
    for entry in sorted(ENTRIES, key=lambda entry: entry.last_used):
        monkeypatch.setattr("time.time", lambda when=entry.last_used: when)
        (region,) = entry.regions
        files = {region.artifact: artifact(entry.id), region.lowered: ATEN.encode()}
        store.add(by_id[entry.structure], entry, files)
        for _ in range(entry.loads):
            store.loaded(entry.id)
        if entry.timing is not None:
            store.timed(entry.id, entry.timing)
    monkeypatch.setattr("time.time", lambda: NOW)
    store.record(missed(FIRST.miss, FIRST, NOW - 2 * HOUR))
    store.record(missed(BATCH, DYNAMIC, NOW - HOUR))
    store.record(missed(msgspec.structs.replace(BATCH, new="50", seconds=0.0), DYNAMIC, NOW - 3 * MINUTE))

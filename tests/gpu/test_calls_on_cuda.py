"""On a card and its real driver every call is counted once, by whichever library it is made; ours settle to none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fabric_pipelines.device import calls
from fabric_pipelines.device.energy import CardMeter, visible
from fabric_pipelines.device.gpu import Gpu

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
TOLD = """
import json
from fabric_pipelines.device import calls
def since():
    global before
    now = calls.read(); found = now.since(before); before = calls.read()
    return {"ours": dict(found.ours), "engine": dict(found.engine), "unseen": now.unseen}
told = {}
"""


def told(program: str) -> dict[str, Any]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, **calls.environment(), "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", TOLD + program + "\nprint(json.dumps(told))"],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def counts(device: int = 0, pinned: int = 0, waits: int = 0, copies: int = 0) -> dict[str, int]:
    return dict(zip(calls.KINDS, (device, pinned, waits, copies), strict=True))


def test_calls_through_cupy_are_counted(gpu: Gpu) -> None:
    found = told(
        "import cupy\n"
        "stream = cupy.cuda.Stream(non_blocking=True); event = cupy.cuda.Event(); stream.synchronize()\n"
        "before = calls.read()\n"
        "held = [cupy.cuda.Memory(1 << 20) for _ in range(3)]; told['device'] = since()\n"
        "with calls.engine():\n"
        "    held += [cupy.cuda.pinned_memory.PinnedMemory(1 << 20) for _ in range(2)]\n"
        "told['pinned'] = since()\n"
        "for _ in range(5): stream.synchronize()\n"
        "event.record(stream); event.synchronize(); cupy.cuda.Device().synchronize()\n"
        "told['waits'] = since()\n"
        "event.record(stream)\n"
        "while not event.done: pass\n"
        "told['asked'] = since()\n"
    )
    assert found["device"] == {"ours": counts(device=3), "engine": counts(), "unseen": 0}
    assert found["pinned"] == {"ours": counts(), "engine": counts(pinned=2), "unseen": 0}
    assert found["waits"]["ours"] == counts(waits=7)
    assert found["asked"]["ours"] == counts(), "to ask an event is not to wait"


def test_calls_through_torch_are_counted(gpu: Gpu) -> None:
    pytest.importorskip("torch")
    found = told(
        "import torch\n"
        "torch.zeros(1, device='cuda'); torch.cuda.synchronize(); before = calls.read()\n"
        "a = torch.empty(64 << 20, dtype=torch.uint8, device='cuda'); told['segment'] = since()\n"
        "del a; a = torch.empty(64 << 20, dtype=torch.uint8, device='cuda'); told['cached'] = since()\n"
        "p = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True); told['pinned'] = since()\n"
        "for _ in range(4): torch.cuda.synchronize()\n"
        "told['waits'] = since()\n"
        "a[: 1 << 20].copy_(p, non_blocking=True); told['copy'] = since()\n"
        "p.copy_(a[: 1 << 20]); told['blocking'] = since()\n"
        "a[:4].sum().item(); told['item'] = since()\n"
    )
    assert found["segment"]["ours"] == counts(device=1)
    assert found["cached"]["ours"] == found["copy"]["ours"] == counts()
    assert found["pinned"]["ours"]["pinned_allocations"] == 1
    assert found["waits"]["ours"] == counts(waits=4)
    assert sum(found["blocking"]["ours"].values()) >= 1
    assert found["item"]["ours"]["synchronisations"] + found["item"]["ours"]["blocking_copies"] >= 1


def test_calls_straight_to_the_driver_are_counted(gpu: Gpu) -> None:
    found = told(
        "import ctypes\n"
        "import cupy; cupy.cuda.Stream(non_blocking=True).synchronize()\n"
        "driver, at = ctypes.CDLL('libcuda.so.1'), ctypes.c_uint64()\n"
        "before = calls.read()\n"
        "assert driver.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(1 << 20)) == 0\n"
        "host = ctypes.create_string_buffer(16)\n"
        "assert driver.cuMemcpyDtoH_v2(host, at, ctypes.c_size_t(16)) == 0\n"
        "assert driver.cuCtxSynchronize() == 0\n"
        "told['all'] = since()\n"
    )
    assert found["all"]["ours"] == counts(device=1, waits=1, copies=1)


def test_a_card_tells_its_energy(gpu: Gpu) -> None:
    with CardMeter(visible("cuda:0")) as card:
        before, busy = card.joules(), card.busy()
        assert before is not None
        assert before > 0
        assert busy is not None
        assert 0 <= busy <= 1

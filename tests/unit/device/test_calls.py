"""The library that counts CUDA calls, preloaded before a stand-in for the driver: every way in is seen, each call once."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fabric_pipelines.device import calls
from fabric_pipelines.errors import UsageError
from tests.support import skip_or_fail

HERE = Path(__file__).parent
SHIM = HERE.parents[2] / "cuda" / "shim"
NOTHING = dict.fromkeys(calls.KINDS, 0)
PREAMBLE = """
import ctypes, json, threading
from fabric_pipelines.device import calls
driver, clients = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libclients.so")
SIZE = ctypes.c_size_t(0x123456789A)
to = ctypes.c_uint64()
"""
TOLD = """
asked = [driver.standin_asked(what) for what in range(4)]
found = calls.read()
print(json.dumps({"asked": asked, "calls": found and found.as_json()}))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in as libcuda.so.1, compiled clients, and the counting library built from its source."""
    compiler = shutil.which("cc")
    if compiler is None or shutil.which("make") is None:
        skip_or_fail("a C compiler and make")
    folder = tmp_path_factory.mktemp("driver")
    share = [compiler, "-O1", "-shared", "-fPIC", "-w"]
    driver = folder / "libcuda.so.1"
    soname = "-Wl,-soname,libcuda.so.1"
    subprocess.run([*share, soname, "-o", driver, HERE / "driver_standin.c"], check=True)
    (folder / "libcuda.so").symlink_to(driver.name)
    linked = ["-L", folder, "-lcuda"]
    clients = [*share, "-o", folder / "libclients.so", HERE / "driver_clients.c", *linked]
    subprocess.run(clients, check=True)
    subprocess.run(["make", "-s", "-C", SHIM, f"OUT={folder}"], check=True)
    return folder


def told(place: Path, program: str, *, counting: bool = True) -> dict[str, Any]:
    environ = {**os.environ, "LD_LIBRARY_PATH": str(place)}
    if counting:
        built = place / platform.machine() / calls.LIBRARY.name
        environ[calls.PRELOAD] = str(built)
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + program + TOLD],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    assert answer["asked"][3] == 0, "an argument was lost on its way to the driver"
    return answer


def test_a_call_is_counted_once_by_whichever_way_it_comes(place: Path) -> None:
    """ctypes (dlsym), the linker, cuGetProcAddress found by cuGetProcAddress; legacy and per-thread streams."""
    found = told(
        place,
        "assert driver.cuMemAlloc_v2(ctypes.byref(to), SIZE) == 0 and to.value == 42\n"
        "assert driver.cuStreamSynchronize(ctypes.c_void_p(7)) == 0\n"
        "assert clients.linked_sync() == 0 and clients.linked_pitch() == 0\n"
        "assert clients.runtime_alloc() == 0\n"
        "assert clients.runtime_sync(0) == 0 and clients.runtime_sync(1) == 0\n"
        "assert driver.cuEventSynchronize(ctypes.c_void_p(9)) == 0\n"
        "assert driver.cuCtxSynchronize() == 0\n"
        "assert driver.cuMemcpyDtoH_v2(ctypes.c_void_p(1), ctypes.c_uint64(42), SIZE) == 0\n",
    )
    assert found["calls"] == {
        "ours": {
            "device_allocations": 3,
            "pinned_allocations": 0,
            "synchronisations": 6,
            "blocking_copies": 1,
        },
        "engine": NOTHING,
        "unseen": 0,
    }
    # The driver synchronises inside its own cuMemAlloc, which is nobody's call.
    assert found["asked"][:3] == [3, 6 + 2, 1]


def test_results_and_faults_of_the_driver_pass_through(place: Path) -> None:
    found = told(
        place,
        "at = ctypes.c_void_p(1)\n"
        "assert driver.cuMemHostAlloc(ctypes.byref(at), SIZE, 2) == 2 and at.value is None\n"
        "assert driver.cuStreamSynchronize(ctypes.c_void_p(5)) == 700\n"
        "assert clients.runtime_launch() == 0\n"
        "assert clients.runtime_knows(b'cuNoSuchCall') == 0\n"
        "assert not hasattr(driver, 'cuMemCreate')\n",
    )
    counted = {"pinned_allocations": 1, "synchronisations": 1}
    assert found["calls"]["ours"] == {**NOTHING, **counted}


def test_a_call_belongs_to_whom_the_thread_was_handed(place: Path) -> None:
    """Ours without a mark, the engine's inside one, ours again where it calls back; other threads keep their own."""
    found = told(
        place,
        "wait = lambda: driver.cuStreamSynchronize(ctypes.c_void_p(7))\n"
        "wait()\n"
        "with calls.engine():\n"
        "    wait(); wait()\n"
        "    with calls.ours():\n"
        "        wait()\n"
        "    other = threading.Thread(target=wait); other.start(); other.join()\n"
        "    clients.runtime_alloc()\n"
        "try:\n"
        "    with calls.engine():\n"
        "        raise ValueError\n"
        "except ValueError:\n"
        "    wait()\n",
    )
    assert found["calls"]["ours"] == {**NOTHING, "synchronisations": 4}
    assert found["calls"]["engine"] == {**NOTHING, "synchronisations": 2, "device_allocations": 1}


def test_calls_of_many_threads_are_all_counted(place: Path) -> None:
    found = told(
        place,
        "def work():\n"
        "    for _ in range(2000):\n"
        "        clients.runtime_sync(0)\n"
        "threads = [threading.Thread(target=work) for _ in range(8)]\n"
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]\n",
    )
    assert found["calls"]["ours"]["synchronisations"] == 16_000
    assert found["calls"]["unseen"] == 0


def test_look_ups_that_are_not_ours_still_ask_on_behalf_of_their_caller(place: Path) -> None:
    """RTLD_NEXT from the clients' library must not find the clients' library."""
    found = told(place, "assert clients.next_is_not_mine() == 0\n")
    assert found["calls"]["ours"] == NOTHING


def test_a_process_that_was_not_started_for_it_says_that_nothing_is_known(place: Path) -> None:
    program = (
        "with calls.engine():\n    assert driver.cuStreamSynchronize(ctypes.c_void_p(7)) == 0\n"
    )
    found = told(place, program, counting=False)
    assert found["calls"] is None
    assert found["asked"][1] == 1


def test_what_happened_since_is_a_difference_by_owner_and_kind() -> None:
    before = calls.Calls({**NOTHING, "synchronisations": 2}, {**NOTHING, "device_allocations": 5})
    after = calls.Calls({**NOTHING, "synchronisations": 2}, {**NOTHING, "device_allocations": 9}, 1)
    assert after.since(before).as_json() == {
        "ours": NOTHING,
        "engine": {**NOTHING, "device_allocations": 4},
        "unseen": 1,
    }


def test_the_shipped_library_was_made_of_the_source_beside_it() -> None:
    made_of = (calls.LIBRARY.parents[1] / "x86_64" / "source.sha256").read_text().strip()
    source = (SHIM / "cuda_calls.c").read_bytes()
    assert hashlib.sha256(source).hexdigest() == made_of, "run `make -C cuda/shim install`"


def test_a_process_is_started_with_the_library_before_what_is_preloaded_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "libfabric_cuda_calls.so"
    monkeypatch.setattr(calls, "LIBRARY", library)
    with pytest.raises(UsageError, match="make -C cuda/shim install"):
        calls.environment({})
    library.touch()
    assert calls.environment({}) == {"LD_PRELOAD": str(library)}
    given = {"LD_PRELOAD": f"libother.so:{library}"}
    assert calls.environment(given) == {"LD_PRELOAD": f"{library}:libother.so"}

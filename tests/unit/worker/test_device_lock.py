"""One device runs one engine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fabric_pipelines.errors import AlreadyRunning, StorageFailed, UsageError
from fabric_pipelines.worker import device_lock
from fabric_pipelines.worker.device_lock import DeviceLock, device_kind, lock_path


def test_a_second_worker_on_a_device_is_refused_with_the_holders_pid(tmp_path: Path) -> None:
    with (
        DeviceLock("cpu:0", "small@engine", tmp_path),
        pytest.raises(AlreadyRunning) as refusal,
        DeviceLock("cpu:0", "other@engine", tmp_path),
    ):
        pass
    assert f"pid {os.getpid()}" in str(refusal.value)
    assert "small@engine" in str(refusal.value)
    assert refusal.value.exit_code == 4


def test_two_devices_do_not_disturb_each_other_and_a_freed_one_can_be_taken(tmp_path: Path) -> None:
    with DeviceLock("cpu:0", "a@b", tmp_path), DeviceLock("cpu:1", "c@d", tmp_path):
        assert "a@b" in lock_path("cpu:0", tmp_path).read_text()
        assert "c@d" in lock_path("cpu:1", tmp_path).read_text()
    with DeviceLock("cpu:0", "e@f", tmp_path):
        assert "e@f" in lock_path("cpu:0", tmp_path).read_text()


def test_a_killed_holder_leaves_the_device_free(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path\n"
        "from fabric_pipelines.worker.device_lock import DeviceLock\n"
        "lock = DeviceLock('cpu:0', 'a@b', Path(sys.argv[1])).__enter__()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    gone = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert gone.returncode == -9
    with DeviceLock("cpu:0", "a@b", tmp_path):
        pass


def test_a_cuda_device_is_locked_for_the_whole_machine_and_a_cpu_slot_for_its_home(
    tmp_path: Path,
) -> None:
    assert lock_path("cuda:0", tmp_path / "a") == lock_path("cuda:0", tmp_path / "b")
    assert lock_path("cpu:0", tmp_path / "a") != lock_path("cpu:0", tmp_path / "b")


@pytest.mark.parametrize(
    "name",
    [
        "gpu0",
        "cuda",
        "cuda:",
        "cpu:-1",
        "../cpu:0",
        "cuda:00",
        "cuda:01",
        "cpu:00",
        "cuda:\u0660",
        "cuda:0\n",
        " cuda:0",
    ],
)
def test_a_device_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="not a device name"):
        device_kind(name)


def test_a_card_is_locked_by_its_own_id_whatever_number_it_has(tmp_path: Path) -> None:
    both = lock_path("cuda:0", tmp_path, "GPU-1"), lock_path("cuda:1", tmp_path, "GPU-1")
    assert both[0] == both[1] != lock_path("cuda:0", tmp_path, "GPU-2")
    assert lock_path("cuda:0", tmp_path, "MIG-GPU-1/../2").parent == both[0].parent


def test_a_lock_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageFailed, match="cpu:0"), DeviceLock("cpu:0", "a@b", tmp_path / "file"):
        pass


def test_holders_of_one_device_share_a_place_and_nobody_else_does(tmp_path: Path) -> None:
    places = []
    for device, folder in (("cpu:0", "a"), ("cpu:0", "a"), ("cpu:1", "a"), ("cpu:0", "b")):
        with DeviceLock(device, "e@f", tmp_path / folder) as lock:
            places.append(lock.place)
    assert places[0] == places[1]
    assert len(set(places)) == 3


def test_a_copy_of_the_lock_file_on_another_machine_is_another_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with DeviceLock("cpu:0", "e@f", tmp_path) as lock:
        here = lock.place
    boot = tmp_path / "boot_id"
    boot.write_text("another boot\n")
    monkeypatch.setattr(device_lock, "BOOT_ID", boot)
    with DeviceLock("cpu:0", "e@f", tmp_path) as lock:
        assert lock.place != here
    assert lock_path("cpu:0", tmp_path).read_text().count("place ") == 1

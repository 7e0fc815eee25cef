"""A generation on a real card: loaded and checked, searched as from the maps, released; killed in its copy."""

import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from fabric_pipelines import shards
from fabric_pipelines.clock import Clock
from fabric_pipelines.device.gpu import Gpu
from fabric_pipelines.errors import CorruptionFound, DeviceRefused, FencingLost, UsageError
from fabric_pipelines.shards import canary, device_copy
from fabric_pipelines.shards.residence import Residence
from fabric_pipelines.testing.vector_store import MemoryVectorStore
from tests.support_resident import same_answers

pytestmark = pytest.mark.gpu
ROWS, DIM = 20_000, 96


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[MemoryVectorStore, Path]:
    rng = np.random.default_rng(5)
    centres = rng.standard_normal((40, DIM)) * 2
    rows = centres[rng.integers(0, 40, ROWS)] + 0.3 * rng.standard_normal((ROWS, DIM))
    store, root = MemoryVectorStore(), tmp_path_factory.mktemp("shards")
    store.put(np.arange(ROWS, dtype=np.int64) + (3 << 40), rows)
    shards.build(
        store, root, "notes", lists=32, seed=7, metric="cosine", recipe={}, lists_per_block=4
    )
    return store, root


def questions() -> np.ndarray:
    return np.random.default_rng(9).standard_normal((700, DIM)).astype(np.float32)


def residence(store: MemoryVectorStore, root: Path, card: Gpu) -> Residence:
    clock = Clock(monotonic_s=lambda: store.now_s, wall_us=lambda: 0)
    return Residence(store, root, "notes", card, clock=clock, keep=False)


@pytest.mark.parametrize("dtype", device_copy.DTYPES)
def test_a_loaded_generation_answers_as_the_maps_do_and_gives_its_memory_back(
    gpu: Gpu, built: tuple[MemoryVectorStore, Path], dtype: str
) -> None:
    store, root = built
    with shards.open_shard(store, root, "notes", device="cuda", dtype=dtype) as there:
        there.search(
            questions(), 10
        )  # what libraries keep for the life of the process is taken here
    gpu.trim()
    free = gpu.memory().free_bytes
    with (
        shards.open_shard(store, root, "notes") as mapped,
        shards.open_shard(store, root, "notes", device="cuda", dtype=dtype) as there,
    ):
        assert isinstance(there, shards.DeviceShard)
        same_answers(there.search(questions(), 10), mapped.search(questions(), 10))
        assert there.answered_by_cpu == 0
        assert there.copy is not None
        assert there.copy.rows.dtype == np.dtype(dtype)
        held = free - gpu.memory().free_bytes
        assert held >= there.copy.rows.nbytes
    assert free - gpu.memory().free_bytes < 4 << 20


def test_what_the_pool_takes_stays_below_what_was_counted(
    gpu: Gpu, built: tuple[MemoryVectorStore, Path]
) -> None:
    store, root = built
    before = gpu.pool_bytes()
    with residence(store, root, gpu) as held, held.open() as shard:
        assert shard.copy is not None
        assert shard.copy.rows.nbytes < gpu.pool_bytes() - before <= shard.copy.bytes
    assert gpu.pool_bytes() == before


def test_a_card_without_room_is_refused_before_anything_is_taken(
    gpu: Gpu, built: tuple[MemoryVectorStore, Path]
) -> None:
    store, root = built
    before = gpu.pool_bytes()
    with (
        residence(store, root, gpu) as held,
        pytest.raises(DeviceRefused, match=r"needs [\d,]+ bytes on .*, its budget is 1,000"),
    ):
        held.open(budget_bytes=1000)
    assert gpu.pool_bytes() == before


def test_a_bit_flipped_on_disk_and_one_flipped_on_the_card_are_both_noticed(
    gpu: Gpu, built: tuple[MemoryVectorStore, Path]
) -> None:
    store, root = built
    with residence(store, root, gpu) as held, held.open() as shard:
        known = canary.answers(shard)
        assert list(canary.changed_answers(shard, known)) == []
        assert shard.copy is not None
        victim = int(np.flatnonzero(shard.stored_ids() == int(known[2]["ids"][0]))[0])
        row = gpu.download(shard.copy.rows[victim])
        row.view(np.uint32)[11] ^= 1
        gpu.store(shard.copy.rows[victim], row)
        assert any(
            item.what == "canary[2].distances" for item in canary.changed_answers(shard, known)
        )
        entry = shard.manifest.of_role("vectors")[3]
        path = shard.generation.folder / entry.path
        content = path.read_bytes()
        try:
            path.write_bytes(content[:5000] + bytes([content[5000] ^ 8]) + content[5001:])
            with pytest.raises(
                CorruptionFound, match=r"vectors block of lists 12\.\.15 .* damaged on disk"
            ):
                held.open()
        finally:
            path.write_bytes(content)


def test_a_lost_lease_gives_the_memory_back_and_a_newer_generation_does_not_disturb_the_old(
    gpu: Gpu, built: tuple[MemoryVectorStore, Path]
) -> None:
    store, root = built
    before = gpu.pool_bytes()
    with residence(store, root, gpu) as held:
        old, again = held.open(), held.open()
        expected = old.search(questions(), 5)
        again.close()
        same_answers(old.search(questions(), 5), expected)
        store.now_s += 10_000
        store.acquire_device("notes", "another card", ttl_s=1)
        with pytest.raises(FencingLost):
            held.beat()
        assert gpu.pool_bytes() == before
        with pytest.raises(FencingLost):
            old.search(questions(), 5)
    store.now_s += 10


def test_a_closed_shard_says_so(gpu: Gpu, built: tuple[MemoryVectorStore, Path]) -> None:
    store, root = built
    with residence(store, root, gpu) as held:
        shard = held.open()
        shard.close()
        with pytest.raises(UsageError, match="was closed"):
            shard.search(questions(), 5)


def _load_and_die(store: MemoryVectorStore, root: Path, step: int) -> None:
    steps = 0

    class Killing(Gpu):
        def __getattribute__(self, name: str) -> object:
            nonlocal steps
            if name in ("empty", "channel", "launch", "download", "store", "products"):
                steps += 1
                if steps == step:
                    os.kill(os.getpid(), signal.SIGKILL)
            return super().__getattribute__(name)

    Residence(store, root, "notes", Killing(), keep=False).open()


@pytest.mark.parametrize("step", [1, 4, 7, 12, 25, 38])
def test_kill_nine_in_the_device_copy_leaves_files_whole_and_the_next_load_works(
    gpu: Gpu, built: tuple[MemoryVectorStore, Path], step: int
) -> None:
    store, root = built
    child = multiprocessing.get_context("spawn").Process(
        target=_load_and_die, args=(store, root, step)
    )
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL
    child.close()
    assert shards.scrub(store, root, "notes").ok
    with (
        residence(store, root, gpu) as held,
        held.open() as there,
        shards.open_shard(store, root, "notes") as mapped,
    ):
        same_answers(there.search(questions()[:20], 10), mapped.search(questions()[:20], 10))

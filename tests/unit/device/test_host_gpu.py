"""The stand-in that runs kernels on the CPU finds what is wrong with them: faults planted in real families and in a toy."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric_pipelines.analytics import kernels, kernels_moments
from fabric_pipelines.analytics.health import Status, measure
from fabric_pipelines.errors import CheckFailed, DeviceRefused, MissingDependency
from fabric_pipelines.testing import host_gpu
from fabric_pipelines.testing.host_gpu import HostGpu
from tests.gpu import test_csr_radius, test_row_admit

CUDA = Path(__file__).parents[3] / "cuda"
BUILD = CUDA.parent / "build" / "host_cuda"  # that of tests/gpu: equal sources are compiled once
DROPPED = ("csr_radius", "step < steps", "step < steps && step < (WIDE ? 32 : 128)")
Planted = Callable[[str, str, str], HostGpu]

TOY = """
#include <cstdint>
extern "C" __global__ void __launch_bounds__(256)
    sums(const float* in, int64_t count, float* out) {  // right: one sum a warp
  const int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  float value = at < count ? in[at] : 0.0f;
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
  if (threadIdx.x % 32 == 0) out[at / 32] = value;
}
extern "C" __global__ void half_a_warp(float* out) {
  if (threadIdx.x % 32 < 16) out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1.0f, 1);
}
extern "C" __global__ void outside_the_mask(float* out) {
  if (threadIdx.x % 32 < 16) out[threadIdx.x] = __shfl_sync(0x0000ffffu, 1.0f, 20);
}
extern "C" __global__ void some_threads_wait(float* out) {
  if (threadIdx.x != 77) __syncthreads();
  out[threadIdx.x] = 1.0f;
}
extern "C" __global__ void unwritten(float* out) {
  __shared__ float part[256];
  if (threadIdx.x != 3) part[threadIdx.x] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = part[threadIdx.x];
}
extern "C" __global__ void past_a_fixed_array(float* out) {
  __shared__ float part[128];
  part[threadIdx.x] = 1.0f;
  out[threadIdx.x] = 1.0f;
}
extern "C" __global__ void off_a_border(const float* in, float* out) {
  out[threadIdx.x] = reinterpret_cast<const float4*>(in + 1)->x;
}
extern "C" __global__ void last_one_wins(int64_t* out) { *out = threadIdx.x; }
extern "C" __global__ void lost_updates(int* count) {
  const int before = atomicAdd(count, 0);
  *count = before + 1;
}
extern "C" __global__ void unordered_flag(int* flag, int* out) {
  if (threadIdx.x == 40) *flag = 1;
  out[threadIdx.x] = threadIdx.x == 200 && *flag > 100;
}
extern "C" __global__ void plain_count(int* count) { *count += 1; }
extern "C" __global__ void counted(int* count) { atomicAdd(count, 1); }
extern "C" __global__ void before_the_start(float* out) { out[-1] = 0.0f; }
"""


@pytest.fixture(autouse=True)
def _compiler() -> None:
    try:
        host_gpu.compiler()
    except MissingDependency as fault:
        if os.environ.get("FABRIC_REQUIRE_PARITY") == "1":
            pytest.fail(f"FABRIC_REQUIRE_PARITY=1: {fault}")
        pytest.skip(str(fault))


@pytest.fixture
def planted(tmp_path: Path) -> Planted:
    """A card whose family, or what it includes, has a fault: its source with one text replaced."""

    def plant(family: str, right: str, wrong: str) -> HostGpu:
        sources = tmp_path / "cuda"
        shutil.copytree(CUDA, sources)
        name = family if "." in family else f"{family}.cu"
        text = (CUDA / name).read_text()
        assert text.count(right) == 1
        (sources / name).write_text(text.replace(right, wrong))
        return HostGpu(sources, BUILD)

    return plant


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> HostGpu:
    folder = tmp_path_factory.mktemp("toy")
    (folder / "toy.cu").write_text(TOY)
    return HostGpu(folder, folder)


def test_dimensions_dropped_past_128_are_found_at_129(planted: Planted) -> None:
    card = planted(*DROPPED)
    same = test_csr_radius.test_squared_radii_equal_the_twin_at_every_size_of_cluster
    same(card, 128)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        same(card, 129)


def test_dimensions_dropped_past_128_make_the_health_table_corrupt(
    planted: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = planted(*DROPPED)
    monkeypatch.setattr(kernels, "Gpu", lambda ordinal: card)
    for dim, corrupt in ((128, False), (132, True)):
        rows = np.random.default_rng(dim).standard_normal((60, dim), dtype=np.float32)
        table = measure(
            rows, np.array([0, 20, 60]), np.arange(60), metric="l2", backend="cuda"
        )  # fmt: skip
        assert (table.readings["rms_radius"].status == Status.CORRUPT).all() == corrupt
        assert (len(table.breaches) > 0) == corrupt


@pytest.mark.parametrize(
    ("metric", "passes"), [("mean_pairwise_distance", "P3 and P9"), ("silhouette", "P3 and P8")]
)
def test_dimensions_that_tiles_drop_past_128_make_their_metrics_corrupt(
    planted: Planted, monkeypatch: pytest.MonkeyPatch, metric: str, passes: str
) -> None:
    loop = "for (int k = 0; k < pitch; k += kSlab)"
    card = planted("include/tiles.cuh", loop, loop.replace("k < pitch", "k < pitch && k < 128"))
    monkeypatch.setattr(kernels, "Gpu", lambda ordinal: card)
    for dim, corrupt in ((128, False), (132, True)):
        rows = np.random.default_rng(dim).standard_normal((60, dim), dtype=np.float32)
        table = measure(
            rows,
            np.array([0, 20, 60]),
            np.arange(60),
            metric="l2",
            backend="cuda",
            only=[metric],
        )
        assert (table.readings[metric].status == Status.CORRUPT).all() == corrupt
        assert list(table.disagreements) == [passes] * corrupt


@pytest.mark.parametrize(
    ("family", "right", "dropped", "corrupt"),
    [
        ("csr_syrk", "= WIDE ? other : own;", " if (dimension >= 128) continue;", [0, 1]),
        ("spectrum", "count += q < 0.0;", " if (i >= 127) break;", [1]),
    ],
)
def test_dimensions_that_spectra_drop_past_128_make_their_metrics_corrupt(
    planted: Planted,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    right: str,
    dropped: str,
    corrupt: list[int],
) -> None:
    """A matrix of rows and one of dimensions: 20 rows have no 128 eigenvalues to drop."""
    card = planted(family, right, right + dropped)
    monkeypatch.setattr(kernels, "Gpu", lambda ordinal: card)
    for dim, expected in ((128, []), (132, corrupt)):
        rows = np.random.default_rng(dim).standard_normal((160, dim), dtype=np.float32)
        table = measure(
            rows,
            np.array([0, 20, 160]),
            np.arange(160),
            metric="l2",
            backend="cuda",
            only=["effective_rank"],
        )
        status = table.readings["effective_rank"].status
        assert np.flatnonzero(status == Status.CORRUPT).tolist() == expected
        assert {"P3 and P6"}.issubset(table.disagreements) == bool(expected)


@pytest.mark.parametrize("centred", [True, False])
def test_a_matrix_whose_kernel_says_it_failed_makes_its_cluster_corrupt_and_no_other(
    monkeypatch: pytest.MonkeyPatch, centred: bool
) -> None:
    honest = kernels_moments.shapes

    def failed(*given: Any, **how: Any) -> Any:
        found = honest(*given, **how)
        if how["centred"] == centred:
            found.status[1] = 1
        return found

    monkeypatch.setattr(kernels, "Gpu", lambda ordinal: HostGpu(CUDA, BUILD))
    monkeypatch.setattr(kernels_moments, "shapes", failed)
    rows = np.random.default_rng(0).standard_normal((90, 6), dtype=np.float32)
    table = measure(
        rows, np.array([0, 30, 60, 90]), np.arange(90), metric="l2", backend="cuda",
        only=["effective_rank"],
    )  # fmt: skip
    status = table.readings["effective_rank"].status
    assert status.tolist() == [Status.OK, Status.CORRUPT, Status.OK]


def test_a_shuffle_that_some_lanes_skip_is_named_with_its_line(planted: Planted) -> None:
    card = planted(
        "csr_radius",
        "const double total = group_sum<LANES>(even + odd);",
        "const double total = active ? group_sum<LANES>(even + odd) : 0.0;",
    )
    rows, indptr = np.ones((5, 100), np.float32), np.array([0, 5])
    host = (rows, np.ones(5), indptr, np.zeros((1, 100)))
    with pytest.raises(
        CheckFailed, match=r"csr_radius_wide_8.*__shfl_xor_sync at lanes\.cuh:\d+.*waits"
    ):
        kernels.csr_radius(card, *(card.upload(part) for part in host))


def test_a_barrier_that_is_missing_shows_in_the_order_of_threads(planted: Planted) -> None:
    card = planted(
        "flat_select", "        __syncthreads();\n        for (int pair", "        for (int pair"
    )
    bound = np.random.default_rng(0).random((1, 1024), np.float32)
    with pytest.raises(CheckFailed, match="flat_limit: argument 3 depends on the order"):
        kernels.flat_limit(card, card.upload(bound), 1, 10, card.empty(1, np.float32))


def test_one_word_past_the_last_row_is_out_of_bounds_by_name_and_line(planted: Planted) -> None:
    card = planted("row_admit", "2 * step + 1 < dim ?", "2 * step + 1 <= dim ?")
    with pytest.raises(
        CheckFailed,
        match=r"row_admit_any_1.*memory outside.*byte 0 past the end of argument 0 \(float32 \[4, 3\]\)",
    ) as found:
        test_row_admit.test_a_signal_in_the_last_dimension_alone_is_seen(card, 3)
    assert shutil.which("addr2line") is None or "row_admit.cu:" in str(found.value)


def test_a_right_kernel_gives_its_result_in_both_orders(toy: HostGpu) -> None:
    given = np.arange(300, dtype=np.float32)
    out = toy.empty(16, np.float32)
    toy.launch("toy", "sums", 2, (toy.upload(given), 300, out))
    padded = np.concatenate([given, np.zeros(212, np.float32)])
    assert out.tolist() == padded.reshape(16, 32).sum(axis=1).tolist()
    assert toy.launches["sums"] == 1
    count = toy.upload(np.zeros(1, np.int32))
    toy.launch("toy", "counted", 3, (count,))
    assert count.tolist() == [768]


@pytest.mark.parametrize(
    ("symbol", "words"),
    [
        ("half_a_warp", r"divergent __shfl_xor_sync at toy\.cu:11 .*thread 16 has ended"),
        ("outside_the_mask", r"toy\.cu:14: lane 0 takes a value from lane 20, outside the mask 0000ffff"),
        ("some_threads_wait", r"__syncthreads at toy\.cu:17 is reached by 255 of 256 .*thread 77 has ended"),
        ("past_a_fixed_array", r"thread 128: misaligned vector, index outside a fixed array"),
        ("before_the_start", r"wrote before the start of argument 0"),
    ],
)  # fmt: skip
def test_what_a_card_would_answer_with_anything_is_refused(
    toy: HostGpu, symbol: str, words: str
) -> None:
    with pytest.raises(CheckFailed, match=f"{symbol}.*{words}" if "wrote" not in words else words):
        toy.launch("toy", symbol, 1, (toy.empty(256, np.float32),))


def test_shared_memory_that_nobody_wrote_is_not_a_number(toy: HostGpu) -> None:
    out = toy.empty(256, np.float32)
    toy.launch("toy", "unwritten", 1, (out,))
    assert np.flatnonzero(np.isnan(out)).tolist() == [3]


def test_a_vector_off_its_border_is_refused(toy: HostGpu) -> None:
    with pytest.raises(CheckFailed, match=r"off_a_border.*misaligned"):
        toy.launch("toy", "off_a_border", 1, (toy.empty(8, np.float32), toy.empty(256, np.float32)))


@pytest.mark.parametrize(
    ("symbol", "kind"), [("last_one_wins", np.int64), ("lost_updates", np.int32)]
)
def test_what_depends_on_who_comes_first_is_refused(
    toy: HostGpu, symbol: str, kind: type[np.generic]
) -> None:
    with pytest.raises(CheckFailed, match=f"{symbol}: argument 0 depends on the order"):
        toy.launch("toy", symbol, 1, (toy.upload(np.zeros(1, kind)),))


def test_a_race_that_changes_nothing_is_named_by_value_threads_and_line(
    tmp_path: Path,
) -> None:
    (tmp_path / "toy.cu").write_text(TOY)
    card = HostGpu(tmp_path, tmp_path, races=True)
    flag, out = card.upload(np.zeros(1, np.int32)), card.empty(256, np.int32)
    with pytest.raises(
        CheckFailed,
        match=r"unordered_flag, block 0: race over argument 0, value 0: thread 40 of block 0 writes it, "
        r"thread 200 reads it",
    ) as found:
        card.launch("toy", "unordered_flag", 1, (flag, out))
    assert shutil.which("addr2line") is None or "toy.cu:" in str(found.value)
    with pytest.raises(CheckFailed, match="plain_count, block 0: race over argument 0"):
        card.launch("toy", "plain_count", 1, (flag,))
    card.launch("toy", "counted", 2, (flag,))
    card.launch("toy", "unwritten", 1, (card.empty(256, np.float32),))
    card.launch(
        "toy", "sums", 1, (card.upload(np.ones(9, np.float32)), 9, card.empty(8, np.float32))
    )
    assert card.launches["sums"] == 1


def test_another_library_takes_hardly_any_of_the_mappings_that_a_process_may_have(
    tmp_path: Path,
) -> None:
    """65,530 of them, and a guard page below each thread's stack takes two: stacks are the process's, not a library's."""
    cards = []
    for name in ("first", "second", "third"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "toy.cu").write_text(TOY + f"// {name}\n")
        cards.append(HostGpu(tmp_path / name, tmp_path / name))
    mappings = []
    for card in cards:
        count = card.upload(np.zeros(1, np.int32))
        card.launch("toy", "counted", 3, (count,))
        assert card.download(count) == 3 * 256
        mappings.append(len(Path("/proc/self/maps").read_text().splitlines()))
    assert mappings[2] - mappings[0] < 40


def test_an_array_that_the_host_has_no_room_for_is_refused(
    toy: HostGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        mmap, munmap = host_gpu._Pages._libc.mmap, host_gpu._Pages._libc.munmap

        @staticmethod
        def mprotect(*_: object) -> int:
            return -1

    monkeypatch.setattr(host_gpu._Pages, "_libc", Full())
    with pytest.raises(DeviceRefused, match="no room for one more array, of 400 bytes"):
        toy.empty(100, np.float32)


def test_arguments_must_be_what_the_kernel_reads(toy: HostGpu) -> None:
    out = toy.empty(256, np.float32)
    for arguments, words in (
        ((out, 5), "takes 3 arguments, the launch gives 2"),
        ((out, 5.0, out), "argument 1 is float 5.0, the kernel reads vi8"),
        ((toy.empty(256, np.float64), 5, out), "argument 0 is float64.*reads rf4"),
        ((np.zeros(5, np.float32), 5, out), "argument 0.*not memory of this card"),
    ):
        with pytest.raises(CheckFailed, match=words):
            toy.launch("toy", "sums", 1, arguments)


def test_unwritten_memory_of_the_card_is_not_a_number(toy: HostGpu) -> None:
    assert np.isnan(toy.empty((3, 5), np.float64)).all()

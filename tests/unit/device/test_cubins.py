"""What ships as machine code: complete, unchanged, without PTX, and equal to what the sources give."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fabric_pipelines.device import build, cubins
from fabric_pipelines.device.cubins import architecture_for, image, kernels_list, read_manifest
from fabric_pipelines.errors import CheckFailed, CorruptionFound, DeviceRefused, DigestMismatch

CUDA = Path(__file__).parents[3] / "cuda"
ARCHS = {"sm_80", "sm_89", "sm_90", "sm_100", "sm_120"}
FAMILIES = {path.stem for path in CUDA.glob("*.cu")}


def test_every_family_ships_for_every_architecture_and_nothing_else() -> None:
    listed = {(cubin.family, cubin.arch) for cubin in read_manifest().cubins}
    assert listed == {(family, arch) for family in FAMILIES for arch in ARCHS}
    on_disk = {(path.stem, path.parent.name) for path in cubins.FOLDER.glob("*/*.cubin")}
    assert on_disk == listed


def test_shipped_bytes_are_those_of_the_manifest_and_hold_no_ptx() -> None:
    for cubin in read_manifest().cubins:
        content = cubin.path.read_bytes()
        assert hashlib.sha256(content).hexdigest() == cubin.sha256
        assert cubins.entry_names(content) == sorted(cubin.entries)
        assert not cubins.holds_ptx(content)
        assert not cubin.ptx


def test_no_entry_spills_registers() -> None:
    spilling = [(cubin.family, cubin.arch) for cubin in read_manifest().cubins if cubin.spills]
    assert spilling == []


def test_the_cubins_were_built_from_the_sources_beside_them() -> None:
    assert read_manifest().sources == build.source_digests(CUDA), "run `make -C cuda install`"


def test_the_list_of_kernels_has_the_stable_keys() -> None:
    for row in kernels_list()["kernels"]:
        assert list(row) == ["family", "arch", "digest", "registers", "spills", "ptx"]
        assert 0 < row["registers"] <= 255


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 0), "sm_80"), ((8, 6), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90"),
     ((10, 0), "sm_100"), ((10, 3), "sm_100"), ((12, 1), "sm_120")],
)  # fmt: skip
def test_a_card_gets_the_newest_cubin_of_its_own_generation(
    capability: tuple[int, int], arch: str
) -> None:
    assert architecture_for(capability, frozenset(ARCHS)) == arch


@pytest.mark.parametrize("capability", [(7, 5), (11, 0), (13, 0)])
def test_a_card_without_a_cubin_is_refused_by_its_number(capability: tuple[int, int]) -> None:
    with pytest.raises(DeviceRefused, match=f"{capability[0]}.{capability[1]}.*make -C cuda"):
        image("row_admit", capability)


def test_a_changed_cubin_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(cubins.FOLDER, tmp_path / "cubin")
    target = tmp_path / "cubin" / "sm_90" / "row_admit.cubin"
    content = bytearray(target.read_bytes())
    content[-1] ^= 1
    target.write_bytes(content)
    monkeypatch.setattr(cubins, "FOLDER", tmp_path / "cubin")
    with pytest.raises(DigestMismatch, match="row_admit"):
        image("row_admit", (9, 0))


def test_a_file_with_ptx_is_recognised() -> None:
    content = (cubins.FOLDER / "sm_90" / "row_admit.cubin").read_bytes()
    assert cubins.holds_ptx(content + b".version 9.0\n.target sm_90\n")
    with pytest.raises(CorruptionFound, match="not a cubin"):
        cubins.holds_ptx(b".version 9.0")


def test_a_log_of_another_build_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sm_90").mkdir()
    shutil.copy(cubins.FOLDER / "sm_90" / "row_admit.cubin", tmp_path / "sm_90")
    (tmp_path / "sm_90" / "row_admit.log").write_text("")
    with pytest.raises(CheckFailed, match="build again"):
        build.collect(tmp_path, CUDA)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("arch", sorted(ARCHS))
def test_sources_compile_to_the_shipped_cubins(tmp_path: Path, arch: str) -> None:
    shutil.copytree(CUDA, tmp_path / "cuda")
    command = ["make", "-s", "-C", str(tmp_path / "cuda"), f"ARCHS={arch}", f"OUT={tmp_path}/out"]
    targets = [f"{tmp_path}/out/{arch}/{family}.cubin" for family in sorted(FAMILIES)]
    environ = {**os.environ, "PYTHON": sys.executable}
    subprocess.run([*command, *targets], check=True, env=environ)
    shipped = read_manifest()
    rebuilt = build.collect(tmp_path / "out", tmp_path / "cuda")
    expected = {cubin.family: cubin for cubin in shipped.cubins if cubin.arch == arch}
    same_compiler = rebuilt.compiler == shipped.compiler
    assert len(rebuilt.cubins) == len(FAMILIES)
    for cubin in rebuilt.cubins:
        assert cubin.spills == 0
        assert not cubin.ptx
        assert sorted(cubin.entries) == sorted(expected[cubin.family].entries)
        if same_compiler:
            assert cubin.entries == expected[cubin.family].entries
            assert cubin.sha256 == expected[cubin.family].sha256


@pytest.mark.skipif(shutil.which("cuobjdump") is None, reason="cuobjdump is not installed")
def test_cuobjdump_finds_no_ptx_in_what_ships() -> None:
    for cubin in read_manifest().cubins:
        listed = subprocess.run(
            ["cuobjdump", "--list-ptx", str(cubin.path)], capture_output=True, text=True
        )
        assert ".ptx" not in listed.stdout

"""What is carried to a machine with a card arrives whole, or nothing is unpacked; the pins name one wheel each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.gpu_machine import check, fetch, join

MIB = 1 << 20


@pytest.fixture
def sent(tmp_path: Path) -> Path:
    """Three files, one larger than a part, as they lie after a fetch."""
    given = tmp_path / "given"
    given.mkdir()
    sizes = {"wheels/large.whl": 5000, "src/a/b.py": 10, "src/empty": 0}
    files = []
    for number, (name, size) in enumerate(sizes.items()):
        path = given / str(number)
        path.write_bytes(bytes((number + n) % 251 for n in range(size)))
        files.append((path, name))
    (given / "1").chmod(0o755)
    names = fetch.pack(files, tmp_path / "sent", 4096, {"python": "3.12", "versions": {}})
    assert names == [f"part.{n:03d}" for n in range(len(names))]
    return tmp_path / "sent"


def parts(sent: Path) -> list[dict[str, object]]:
    return list(json.loads((sent / "parts.json").read_text())["parts"])


def test_what_was_packed_is_unpacked_the_same_and_no_part_is_too_large(
    sent: Path, tmp_path: Path
) -> None:
    assert len(parts(sent)) > 2
    assert all((sent / str(part["name"])).stat().st_size <= 4096 for part in parts(sent))
    assert join.faults(sent, parts(sent)) == []
    join.unpack(sent, parts(sent), tmp_path / "there")
    for number, name in enumerate(("wheels/large.whl", "src/a/b.py", "src/empty")):
        there = tmp_path / "there" / name
        assert there.read_bytes() == (tmp_path / "given" / str(number)).read_bytes()
    assert (tmp_path / "there" / "src/a/b.py").stat().st_mode & 0o100, "programs stay programs"


@pytest.mark.parametrize("how", ["missing", "cut", "one bit", "another part"])
def test_a_part_that_did_not_arrive_whole_is_named_and_nothing_is_unpacked(
    sent: Path, tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = sent / "part.001"
    content = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "cut":
        path.write_bytes(content[:-1])
    elif how == "one bit":
        content[7] ^= 1
        path.write_bytes(content)
    else:
        path.write_bytes((sent / "part.000").read_bytes())
    assert join.main([str(sent), str(tmp_path / "there")]) == 1
    told = capsys.readouterr().err
    assert "part.001" in told
    assert "part.000" not in told
    assert not (tmp_path / "there").exists()


def test_nothing_is_mixed_into_what_is_there(
    sent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="is not empty: parts of two fetches must not mix"):
        fetch.pack([], sent, MIB, {})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("")
    assert join.main([str(sent), str(tmp_path / "full")]) == 1
    assert "full is not empty" in capsys.readouterr().err


def test_the_other_python_needs_nothing_of_ours_to_join(sent: Path, tmp_path: Path) -> None:
    (sent / "parts.json").write_text(
        json.dumps({"python": "2.7", "versions": {}, "parts": parts(sent)})
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(sent / "join.py"), str(sent), str(tmp_path / "there")],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 1
    assert ", not 2.7" in done.stderr


def test_every_package_is_pinned_to_one_wheel_and_no_group_contradicts_another() -> None:
    files = {path.stem for path in (fetch.HERE / "packages").iterdir()}
    assert files == set(fetch.GROUPS)
    seen: dict[str, str] = {}
    for group in fetch.GROUPS:
        found = fetch.pins(group)
        assert found, group
        for name, version in found.items():
            key = name.lower().replace("_", "-")
            assert seen.setdefault(key, version) == version, f"{name} of {group}"
    assert "torch" not in seen, "the machine brings it with its CUDA"
    assert "dagster" not in seen


def test_the_tree_is_carried_as_git_knows_it() -> None:
    names = {name for _, name in fetch.tree_files(fetch.TREE)}
    assert {"src/tests/bench/gpu_machine/check.py", "src/pyproject.toml"} <= names
    assert any(name.endswith(".cubin") for name in names)
    assert not any("__pycache__" in name for name in names)


def test_a_package_of_another_version_and_one_that_is_not_there_are_told() -> None:
    found = check.packages({"pyarrow": "0.1", "no-such-distribution": "1"})
    assert found[0].startswith("pyarrow is ")
    assert found[0].endswith(", not 0.1")
    assert found[1] == "no-such-distribution is not installed"

"""A test of the source itself: layout, names and rules that no linter holds."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("fabric_pipelines", "assets", "resources")
TOP_LEVEL = {
    "pyproject.toml",
    "fabric_pipelines",
    "assets",
    "resources",
    "cuda",
    "tests",
    "workspace.yaml",
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
    "docs",
}
FORBIDDEN_MODULE_NAMES = {"utils", "util", "helpers", "helper", "manager", "misc", "common"}
LINES_MAX = 700
# A line that only a person's machine or a workplace can mean must never be published.
MACHINE_MARKS = re.compile(
    r"/root/|/home/[a-z]+/|/work/|/tmp/[a-z]+-[a-z]+/|https?://(10|172|192)\."
)


def _tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False, text=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout: nothing says which files belong to the project")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


def _sources(*folders: str) -> Iterator[tuple[Path, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path, ast.parse(path.read_text(), str(path))


def test_the_root_holds_the_agreed_names_and_nothing_else() -> None:
    names = {path.relative_to(ROOT).parts[0] for path in _tracked()}
    assert {name for name in names if not name.startswith(".")} <= TOP_LEVEL


def test_cuda_is_no_python_package() -> None:
    assert list((ROOT / "cuda").rglob("*.py")) == []
    for taken in ("assets", "resources", "cuda"):
        assert not (ROOT / "tests" / taken).exists()
    found = importlib.machinery.PathFinder.find_spec("cuda", [str(ROOT)])
    assert found is None or found.origin is None


def test_every_module_says_what_it_owns() -> None:
    assert [str(p) for p, tree in _sources(*PACKAGES, "tests") if not ast.get_docstring(tree)] == []


def test_no_module_is_a_drawer_for_anything() -> None:
    assert [p for p, _ in _sources(*PACKAGES) if p.stem in FORBIDDEN_MODULE_NAMES] == []


def test_no_module_is_longer_than_a_reader_can_hold() -> None:
    long = {
        str(p): n
        for p, _ in _sources(*PACKAGES)
        if (n := len(p.read_text().splitlines())) > LINES_MAX
    }
    assert long == {}


def test_every_test_asserts_something() -> None:
    """A test passes only through an assertion, an expected error, or a helper named for the claim it checks."""

    def claims(node: ast.AST) -> bool:
        for part in ast.walk(node):
            if isinstance(part, ast.Assert):
                return True
            if isinstance(part, ast.Call):
                name = ast.unparse(part.func)
                if re.search(
                    r"pytest\.(raises|fail|warns)|(^|[._])(assert|require|check|verify|expect)",
                    name,
                ):
                    return True
        return False

    silent = [
        f"{path.name}::{node.name}"
        for path, tree in _sources("tests")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and not claims(node)
    ]
    assert silent == []


def test_stand_ins_are_imported_by_tests_and_by_two_benches_only() -> None:
    """No disk can be asked what a crash may leave on it, so the bench of crashes simulates one; that of kernels is rehearsed on the
    host, since minutes of a card are too few to find its mistakes there."""
    users = [
        str(path.relative_to(ROOT))
        for path, tree in _sources(*PACKAGES)
        if "testing" not in path.parts
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("fabric_pipelines.testing")
    ]
    assert set(users) == {"fabric_pipelines/bench/crash.py", "fabric_pipelines/bench/kernels.py"}


def test_nothing_is_pickled() -> None:
    users = [
        str(path.relative_to(ROOT))
        for path, tree in _sources(*PACKAGES)
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [a.name for a in node.names]
        )
        if name.split(".")[0] in {"pickle", "cloudpickle", "dill"}
    ]
    assert users == []


def test_no_unfinished_mark_is_left() -> None:
    marks = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
    left = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in _tracked()
        if path.suffix in {".py", ".cu", ".cuh", ".sql", ".md", ".toml"} and path != Path(__file__)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if marks.search(line)
    ]
    assert left == []


def test_no_test_signals_more_than_one_process_by_its_number() -> None:
    """`os.kill(pid or 0, 9)` ends the whole run when the process has no pid just then: `support.send` refuses."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, tree in _sources("tests")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "os.kill"
        and ast.unparse(node.args[0]) != "os.getpid()"
        and path.name != "support.py"
    ]
    assert found == []


def test_no_path_of_a_machine_is_published() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in _tracked()
        if path.suffix in {".py", ".md", ".toml", ".yaml", ".sql", ".cu", ".cuh", ".txt", ".json"}
        and path != Path(__file__)
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if MACHINE_MARKS.search(line)
    ]
    assert found == []


def test_a_kernel_its_twin_and_its_test_share_one_word() -> None:
    kernels = {path.stem for path in (ROOT / "cuda").glob("*.cu")}
    assert kernels, "there is no kernel family"
    twins = {path.stem for path in (ROOT / "fabric_pipelines/analytics/reference").glob("*.py")}
    tests = {path.stem.removeprefix("test_") for path in (ROOT / "tests/gpu").glob("test_*.py")}
    assert kernels - twins == set()
    assert kernels - tests == set()


def test_the_layers_hold() -> None:
    """Import contracts of pyproject.toml, run as a test so that one command checks everything."""
    done = subprocess.run(["lint-imports"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


def test_workspace_and_pyproject_name_the_same_code_location() -> None:
    workspace = (ROOT / "workspace.yaml").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    module = re.search(r"module_name: (\S+)", workspace)
    location = re.search(r"location_name: (\S+)", workspace)
    assert module is not None
    assert location is not None
    assert f'code_location_target_module = "{module[1]}"' in project
    assert f'code_location_name = "{location[1]}"' in project
    assert importlib.util.find_spec(module[1].split(".")[0]) is not None

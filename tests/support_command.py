"""The `fabric` command as its first user meets it: a real process, in a folder of its own, and what it said."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fabric_pipelines import models, supervise
from fabric_pipelines.errors import MissingDependency, SourceUnreachable
from fabric_pipelines.settings import Settings, load
from tests.support import skip_or_fail

TREE = Path(__file__).parents[1]
MINI = "all-minilm-l6-v2"
EMBED = "all-minilm-l6-v2@onnxruntime-fp32"
HIDE = """
import importlib.machinery, os
hidden = set(os.environ["HIDE"].split(","))
look = importlib.machinery.PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in hidden else look(name, path, target)
importlib.machinery.PathFinder.find_spec = staticmethod(find_spec)
"""


@dataclass(frozen=True, slots=True)
class Said:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The last line on stderr; what stands before it is progress."""
        return self.err.strip().splitlines()[-1]


@dataclass(frozen=True, slots=True)
class User:
    """A working folder, the variables of a shell, and a home that the fabric may fill."""

    folder: Path
    home: Path
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def settings(self) -> Settings:
        shell = {**self.environment, "FABRIC_HOME": str(self.home)}
        return load({}, {k: v for k, v in shell.items() if k.startswith("FABRIC_")}, self.folder)

    def variables(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, (self.environment.get("PYTHONPATH"), str(TREE))))
        return {**os.environ, "FABRIC_HOME": str(self.home), **self.environment, "PYTHONPATH": path}

    def start(self, *arguments: str, module: str = "fabric_pipelines") -> subprocess.Popen[str]:
        """In a process group of its own, as a shell starts it."""
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=self.folder,
            env=self.variables(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def fabric(self, *arguments: str, module: str = "fabric_pipelines") -> Said:
        process = self.start(*arguments, module=module)
        try:
            out, err = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        assert "Traceback" not in out + err, err
        return Said(process.returncode, out, err)

    def done(self, *arguments: str) -> Said:
        said = self.fabric(*arguments)
        assert said.code == 0, said.err
        return said

    def refused(
        self,
        *arguments: str,
        code: int,
        progress: bool = False,
        module: str = "fabric_pipelines",
    ) -> str:
        """The one sentence of a command that must end with `code`; with `progress` lines may stand before. With --json
        stdout has the same."""
        said = self.fabric(*arguments, module=module)
        assert said.code == code, said.err
        told = json.loads(said.out)["error"]["message"] if "--json" in arguments else ""
        assert (told or said.out) == (said.sentence if told else "")
        assert progress or len(said.err.strip().splitlines()) == 1, said.err
        return said.sentence

    def beside(self, home: Path, **variables: str) -> User:
        """The same user with another home or other variables."""
        return User(self.folder, home, {**self.environment, **variables})

    def hiding(self, *packages: str) -> User:
        """The same user on a machine where `packages` are not installed."""
        hide = self.folder / "hide"
        hide.mkdir(exist_ok=True)
        (hide / "sitecustomize.py").write_text(HIDE)
        return self.beside(self.home, PYTHONPATH=str(hide), HIDE=",".join(packages))


@contextmanager
def first_user(home: str = "home") -> Iterator[User]:
    """Stops what ran at the end and removes every trace of it, also what root keeps outside the home."""
    # short, and open to the server's own user: pytest's tmp_path is neither
    folder = Path(tempfile.mkdtemp(prefix="fabric-first-")).resolve()
    folder.chmod(0o755)
    kept = {"FABRIC_MODELS": os.environ["FABRIC_MODELS"]} if "FABRIC_MODELS" in os.environ else {}
    user = User(folder, folder / home, kept)
    try:
        yield user
    finally:
        supervise.down(user.settings)
        user.done("reset", "--yes")
        shutil.rmtree(folder)


@contextmanager
def small_disk(folder: Path, size: str, *, read_only: bool = False) -> Iterator[Path]:
    """`folder` as a file system of its own, so small that it fills up, or one that takes no write."""
    folder.mkdir(parents=True, exist_ok=True)
    options = f"size={size},mode=755" + (",ro" if read_only else "")
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode and os.geteuid():
        pytest.skip("only root mounts a small disk")
    if done.returncode:
        skip_or_fail(f"a small disk cannot be mounted: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def require_models(user: User, *names: str) -> None:
    try:
        for name in names:
            models.pull(name, user.settings.models)
    except (SourceUnreachable, MissingDependency) as fault:
        skip_or_fail(str(fault))

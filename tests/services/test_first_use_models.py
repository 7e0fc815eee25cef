"""A model file that is not the pinned one, before and after conversion: refused, and nothing half-made is kept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fabric_pipelines import models
from tests.support_command import EMBED, MINI, User, first_user, require_models


@pytest.fixture(scope="module")
def user() -> Iterator[User]:
    """With a model cache of its own, still empty."""
    with first_user() as made:
        require_models(made, MINI)
        yield made.beside(made.home, FABRIC_MODELS=str(made.folder / "cache"))


@pytest.fixture(scope="module")
def pulled(user: User) -> models.ModelFiles:
    """The real model in the shared cache; only to be read."""
    return models.located(MINI, User(user.folder, user.home).settings.models)


def flip_one_bit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def test_a_source_with_one_wrong_bit_is_refused_and_leaves_nothing(
    user: User, pulled: models.ModelFiles
) -> None:
    source = Path(shutil.copytree(pulled.sources, user.folder / "source"))
    flip_one_bit(source / "model.safetensors")
    said = user.refused("models", "pull", MINI, "--source", str(source), code=4, progress=True)
    assert said.startswith(
        f"{source}/model.safetensors is not the pinned model.safetensors: expected"
    )
    assert said.endswith("nothing was kept")
    kept = [path.name for path in (user.folder / "cache" / MINI).iterdir()]
    assert kept == [".lock"]


def test_verify_says_one_line_a_model_and_names_what_differs(
    user: User, pulled: models.ModelFiles
) -> None:
    mine = user.folder / "verified"
    shutil.copytree(pulled.sources.parent, mine / MINI)
    reader = user.beside(user.home, FABRIC_MODELS=str(mine))
    answer = json.loads(reader.done("models", "verify", "--json").out)
    assert [(row["name"], row["ok"]) for row in answer["models"]] == [(MINI, True)]
    converted = [models.contents(folder)["files"] for folder in pulled.parts.values()]
    assert answer["models"][0]["files"] == len(pulled.spec.files) + sum(map(len, converted))
    assert answer["models"][0]["size"] > pulled.spec.size
    assert reader.done("models", "verify").out.startswith(f"{MINI}  ")
    weights = mine / MINI / pulled.parts["onnxruntime-fp32"].name / "trunk.weights"
    flip_one_bit(weights)
    said = reader.fabric("models", "verify", MINI, "--json")
    assert said.code == 3
    assert json.loads(said.out)["models"][0]["differences"] == [
        f"{weights} changed: its sha256 is another one"
    ]
    assert said.sentence.startswith("1 file of the model cache differs: run `fabric models pull ")


def test_verify_of_what_is_not_there_names_the_command(user: User) -> None:
    empty = user.beside(user.home, FABRIC_MODELS=str(user.folder / "empty"))
    said = empty.refused("models", "verify", MINI, code=2)
    assert said.endswith(f"run `fabric models pull {MINI}`")
    assert json.loads(empty.done("models", "verify", "--json").out)["models"] == []


def test_prune_shows_asks_and_deletes_only_what_is_outdated(
    user: User, pulled: models.ModelFiles
) -> None:
    mine = user.folder / "pruned"
    for folder in (
        pulled.sources,
        *pulled.parts.values(),
    ):  # the shared cache may hold outdated ones
        shutil.copytree(folder, mine / MINI / folder.name)
    old = mine / MINI / "onnxruntime-fp32-0123456789abcdef"
    shutil.copytree(pulled.parts["tokeniser"], old)
    keeper = user.beside(user.home, FABRIC_MODELS=str(mine))
    asked = keeper.fabric("models", "prune")
    assert (asked.code, asked.sentence) == (130, "not answered, so nothing was changed")
    assert str(old) in asked.err
    assert old.exists()
    answer = json.loads(keeper.done("models", "prune", "--yes", "--json").out)
    assert answer["removed"] == [str(old)]
    assert answer["bytes"] > 0
    assert not old.exists()
    assert json.loads(keeper.done("models", "verify", "--json").out)["ok"]
    assert json.loads(keeper.done("models", "prune", "--json").out) == {"removed": [], "bytes": 0}


def test_a_converted_file_with_one_wrong_bit_never_runs(
    user: User, pulled: models.ModelFiles
) -> None:
    for folder in pulled.parts.values():
        shutil.copytree(folder, user.folder / "cache" / MINI / folder.name)
    weights = user.folder / "cache" / MINI / pulled.parts["onnxruntime-fp32"].name / "trunk.weights"
    flip_one_bit(weights)
    said = user.refused("worker", "run", "--engine", EMBED, code=4)
    assert said == (
        f"{weights} changed since it was converted (sha256 differs): run `fabric models pull {MINI}`, which makes "
        f"{weights.parent.name} again"
    )

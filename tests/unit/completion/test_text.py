"""Text beside token ids: by the engine's own tokeniser where it is installed, null where it is not."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from fabric_pipelines import models
from fabric_pipelines.completion import text
from fabric_pipelines.completion.text import Decoder

OUTPUTS = pa.array([[1, 2], None, []], pa.list_(pa.uint32()))


class Spelling:
    def decode(self, ids: object) -> list[str]:
        return ["".join(map(str, row)) for row in ids]  # type: ignore[attr-defined]


def test_a_model_that_is_not_installed_leaves_text_out(tmp_path: Path) -> None:
    assert Decoder(tmp_path)("smollm2-135m-instruct@ctranslate2-int8", OUTPUTS) is None
    assert Decoder(tmp_path)("nobodys@engine", OUTPUTS) is None


def test_rows_decode_by_the_model_before_the_at_sign_and_null_stays_null(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def tokeniser(name: str, cache: Path) -> Spelling:
        asked.append(name)
        return Spelling()

    monkeypatch.setattr(models, "tokeniser", tokeniser)
    decoder = Decoder(tmp_path)
    assert decoder("m@e", OUTPUTS).to_pylist() == ["12", None, ""]
    assert decoder("m@other", OUTPUTS).to_pylist() == ["12", None, ""]
    assert asked == ["m"]


def test_a_model_pulled_later_is_found_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = Decoder(tmp_path)
    assert decoder("m@e", OUTPUTS) is None
    monkeypatch.setattr(models, "tokeniser", lambda name, cache: Spelling())
    assert decoder("m@e", OUTPUTS) is None, "not looked for again at once"
    monkeypatch.setattr(text, "LOOK_AGAIN_S", 0.0)
    assert decoder("m@e", OUTPUTS) is not None

"""The reference engine on a card: the conformance suite in float32, and one kernel for all sequences in bfloat16."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric_pipelines.worker.engines import varlen
from fabric_pipelines.worker.engines.tasks import tasks_of
from tests.engine_conformance import Conformance, Subject
from tests.reference_models import relative_error
from tests.tiny_models import LAYERS, WORDS, lease_of
from tests.unit.engines import transformers_tiny as tiny_checkpoints
from tests.unit.engines.test_conformance import FP16, GREEDY, PROMPTS, TEXTS, _Broken
from tests.unit.engines.transformers_tiny import EMBED, EOS, GENERATE, HIDDEN, TinyCheckpoints

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
NEW = 6
HALF = 2e-2  # bfloat16 keeps 8 bits, over three layers


@pytest.fixture(scope="module")
def torch() -> Any:
    said = "needs torch and transformers" if importlib.util.find_spec("torch") is None else ""
    if not said:
        import torch

        said = "" if torch.cuda.is_available() else "needs a CUDA device"
        if not said:
            return torch
    if os.environ.get("FABRIC_REQUIRE_GPU") == "1":
        pytest.fail(f"FABRIC_REQUIRE_GPU=1, and this {said}")
    pytest.skip(said)


@pytest.fixture(scope="module")
def tiny(torch: Any, tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoints:
    return tiny_checkpoints.write_checkpoints(tmp_path_factory.mktemp("transformers"))


def _subject(engine: Any, direct: Any, sampling: dict[str, Any], **more: Any) -> Subject:
    chosen: dict[str, Any] = {"oversized": [4] * 501, "bad_token": 9_999, **more}
    prompts, new = chosen.pop("prompts", PROMPTS), chosen.pop("new", 0)
    return Subject(engine, sampling, prompts, new, direct, **chosen)


class TestGenerateOnCuda(Conformance):
    @pytest.fixture
    def subject(self, torch: Any, tiny: TinyCheckpoints) -> Iterator[Subject]:
        import transformers

        loaded = transformers.AutoModelForCausalLM.from_pretrained(tiny.folder(GENERATE))
        model = loaded.eval().cuda()

        def direct(prompts: Any) -> list[Any]:
            with torch.no_grad():
                made = [
                    model.generate(
                        torch.tensor([prompt]).cuda(),
                        max_new_tokens=NEW,
                        do_sample=False,
                        eos_token_id=EOS,
                    )[0, len(prompt) :].tolist()
                    for prompt in prompts
                ]
            return [tokens[:-1] if tokens[-1] == EOS else tokens for tokens in made]

        with tiny_checkpoints.opened(GENERATE, tiny.cache, device="cuda") as engine:
            broken = lambda: setattr(engine, "_model", _Broken())  # noqa: E731
            yield _subject(engine, direct, GREEDY, new=NEW, breaks=broken)


class TestHiddenOnCuda(Conformance):
    @pytest.fixture
    def subject(self, torch: Any, tiny: TinyCheckpoints) -> Iterator[Subject]:
        import transformers

        model = transformers.AutoModel.from_pretrained(tiny.folder(HIDDEN)).eval().cuda()

        def direct(prompts: Any) -> list[Any]:
            with torch.no_grad():
                return [
                    model(torch.tensor([prompt]).cuda(), output_hidden_states=True)
                    .hidden_states[2][0, -1]
                    .cpu()
                    .numpy()
                    for prompt in prompts
                ]

        with tiny_checkpoints.opened(HIDDEN, tiny.cache, device="cuda") as engine:
            yield _subject(
                engine,
                direct,
                {"kind": "hidden", "layers": [2], "pooling": "last"},
                breaks=lambda: setattr(engine, "_pass", _Broken().run),
                tolerance=FP16 * 10,
            )


class TestEmbedOnCuda(Conformance):
    @pytest.fixture
    def subject(self, torch: Any, tiny: TinyCheckpoints) -> Iterator[Subject]:
        import transformers

        model = (
            transformers.AutoModel.from_pretrained(tiny.folder(EMBED), add_pooling_layer=False)
            .eval()
            .cuda()
        )

        def direct(prompts: Any) -> list[Any]:
            with torch.no_grad():
                states = [
                    model(torch.tensor([text]).cuda()).last_hidden_state[0].mean(0).cpu().numpy()
                    for text in prompts
                ]
            return [mean / np.linalg.norm(mean) for mean in states]

        with tiny_checkpoints.opened(EMBED, tiny.cache, device="cuda") as engine:
            yield _subject(
                engine,
                direct,
                {"kind": "embed", "pooling": "mean", "normalise": True},
                prompts=TEXTS,
                breaks=lambda: setattr(engine, "_pass", _Broken().run),
                bad_token=len(WORDS) + 100,
                tolerance=FP16,
            )


def test_compiled_blocks_give_the_same_states(
    torch: Any, tiny: TinyCheckpoints, tmp_path: Path
) -> None:
    own = tiny.copied(tmp_path / "models")
    name = f"{HIDDEN}-compiled"
    own.folder(HIDDEN).rename(own.folder(name))
    draw = np.random.default_rng(6)
    sampling = {"kind": "hidden", "layers": [0, 1, LAYERS], "pooling": "mean"}
    with (
        tiny_checkpoints.opened(name, own.cache, device="cuda") as compiled,
        tiny_checkpoints.opened(HIDDEN, tiny.cache, device="cuda") as plain,
    ):
        for lengths in ([3, 40, 1], [7], [100, 2, 2, 90]):
            prompts = [draw.integers(0, 264, n).tolist() for n in lengths]
            tasks = tasks_of(lease_of(prompts, sampling))
            assert relative_error(compiled.vectors(tasks), plain.vectors(tasks)) < 1e-5


def test_in_half_precision_one_kernel_serves_all_sequences_and_none_changes_another(
    torch: Any, tiny: TinyCheckpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tiny.copied(tmp_path / "models")
    for name in (HIDDEN, EMBED):
        config = own.folder(name) / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "torch_dtype": "bfloat16"}))
        tiny_checkpoints.describe_again(own.folder(name))
    calls: list[int] = []
    real = varlen._one_kernel

    def counted(query: Any, *rest: Any) -> Any:
        calls.append(query.shape[0])
        return real(query, *rest)

    monkeypatch.setattr(varlen, "_one_kernel", counted)
    draw = np.random.default_rng(5)
    lengths = [1, 2, 31, 3, 100, 1, 64]
    for name, sampling, vocab in (
        (HIDDEN, {"kind": "hidden", "layers": [0, LAYERS], "pooling": "mean"}, 264),
        (EMBED, {"kind": "embed"}, 13),
    ):
        prompts = [draw.integers(0, vocab, n).tolist() for n in lengths]
        with tiny_checkpoints.opened(name, own.cache, device="cuda") as engine:
            assert engine._model.dtype == torch.bfloat16
            calls.clear()  # those of the warm-up
            together = engine.vectors(tasks_of(lease_of(prompts, sampling)))
            assert calls, "the kernel was not used"
            assert set(calls) == {sum(lengths)}
            calls.clear()
            for row, prompt in zip(together, prompts, strict=True):
                alone = engine.vectors(tasks_of(lease_of([prompt], sampling)))[0]
                assert relative_error(row, alone) < HALF
            calls.clear()
        with tiny_checkpoints.opened(name, tiny.cache, device="cuda") as exact:
            truth = exact.vectors(tasks_of(lease_of(prompts, sampling)))
        assert relative_error(together, truth) < HALF

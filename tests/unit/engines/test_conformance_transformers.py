"""The conformance suite over the transformers engine, on CPU with tiny models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from fabric_pipelines.worker.engines.transformers import PassEngine
from tests.engine_conformance import Conformance, Subject
from tests.tiny_models import WORDS
from tests.unit.engines.test_conformance import FP16, GREEDY, PROMPTS, TEXTS, _Broken
from tests.unit.engines.transformers_tiny import (
    EMBED,
    EOS,
    GENERATE,
    HIDDEN,
    TinyCheckpoints,
    libraries,
    opened,
    write_checkpoints,
)

pytestmark = pytest.mark.filterwarnings("default")
NEW = 6


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoints:
    return write_checkpoints(tmp_path_factory.mktemp("transformers"))


class TestGenerate(Conformance):
    @pytest.fixture
    def subject(self, tiny: TinyCheckpoints) -> Iterator[Subject]:
        torch, transformers = libraries()
        model = transformers.AutoModelForCausalLM.from_pretrained(tiny.folder(GENERATE)).eval()

        def direct(prompts: Sequence[list[int]]) -> list[Any]:
            with torch.no_grad():
                made = [
                    model.generate(
                        torch.tensor([prompt]),
                        max_new_tokens=NEW,
                        do_sample=False,
                        eos_token_id=EOS,
                    )[0, len(prompt) :].tolist()
                    for prompt in prompts
                ]
            return [tokens[:-1] if tokens[-1] == EOS else tokens for tokens in made]

        with opened(GENERATE, tiny.cache) as engine:
            yield Subject(
                engine,
                GREEDY,
                PROMPTS,
                NEW,
                direct,
                breaks=lambda: setattr(engine, "_model", _Broken()),
                oversized=[5] * 501,
                bad_token=9_999,
            )


class TestHidden(Conformance):
    @pytest.fixture
    def subject(self, tiny: TinyCheckpoints) -> Iterator[Subject]:
        torch, transformers = libraries()
        model = transformers.AutoModel.from_pretrained(tiny.folder(HIDDEN)).eval()

        def direct(prompts: Sequence[list[int]]) -> list[Any]:
            with torch.no_grad():
                return [
                    model(torch.tensor([prompt]), output_hidden_states=True)
                    .hidden_states[2][0, -1]
                    .numpy()
                    for prompt in prompts
                ]

        with opened(HIDDEN, tiny.cache) as engine:
            yield Subject(
                engine,
                {"kind": "hidden", "layers": [2], "pooling": "last"},
                PROMPTS,
                0,
                direct,
                breaks=lambda: setattr(engine, "_pass", _Broken().run),
                oversized=[5] * 501,
                bad_token=9_999,
                tolerance=FP16 * 10,
            )


class TestHiddenLaunchedAhead(TestHidden):
    """As on a card: a step is launched before the results of the one before are fetched."""

    @pytest.fixture
    def subject(self, tiny: TinyCheckpoints, monkeypatch: pytest.MonkeyPatch) -> Iterator[Subject]:
        ready = PassEngine._ready

        def ready_as_on_a_card(engine: PassEngine) -> None:
            ready(engine)
            engine._launch_ahead()

        monkeypatch.setattr(PassEngine, "_ready", ready_as_on_a_card)
        make: Any = TestHidden.subject
        yield from make.__wrapped__(self, tiny)


class TestEmbed(Conformance):
    @pytest.fixture
    def subject(self, tiny: TinyCheckpoints) -> Iterator[Subject]:
        torch, transformers = libraries()
        model = transformers.AutoModel.from_pretrained(
            tiny.folder(EMBED), add_pooling_layer=False
        ).eval()

        def direct(prompts: Sequence[list[int]]) -> list[Any]:
            with torch.no_grad():
                means = [
                    model(torch.tensor([text])).last_hidden_state[0].mean(0).numpy()
                    for text in prompts
                ]
            return [mean / np.linalg.norm(mean) for mean in means]

        with opened(EMBED, tiny.cache) as engine:
            yield Subject(
                engine,
                {"kind": "embed", "pooling": "mean", "normalise": True},
                TEXTS,
                0,
                direct,
                breaks=lambda: setattr(engine, "_pass", _Broken().run),
                oversized=[4] * 501,
                bad_token=len(WORDS) + 100,
                tolerance=FP16,
            )

"""The conformance suite over every engine that needs no GPU, on tiny models, and over vLLM's stand-in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric_pipelines.testing.scripted_engine import Script, ScriptedEngine, expected_output
from fabric_pipelines.worker.engines.door import Engine
from tests.engine_conformance import Conformance, Subject
from tests.tiny_models import TOKENS, WORDS
from tests.unit.engines.float32_sums import float32_sums
from tests.unit.engines.vllm_over_standin import EOS, VOCAB, VllmOverStandin

GREEDY = {"kind": "generate", "temperature": 0.0}
PROMPTS = [[5, 9, 200, 17, 30], [7, 7], [261, 3, 3, 8, 120, 44, 90, 11], [6, 6, 40, 41]]
TEXTS = [[2, 4, 5, 6, 3], [2, 7, 3], [2, 3], [2, 4, 5, 8, 9, 3]]
FP16 = 1e-3


class _Broken:
    """Whatever is called on it fails as a runtime does."""

    def __getattr__(self, name: str) -> Any:
        def fail(*args: object, **kwargs: object) -> Any:
            raise RuntimeError("device lost")

        return fail


class TestCtranslate2(Conformance):
    def test_an_answer_is_that_of_its_prompt_alone_whatever_lengths_are_beside_it(
        self, subject: Subject
    ) -> None:
        """In float32: the rounding of int8 tells lengths apart (docs/engines.md)."""
        assert float32_sums(subject.engine).compute_type == "float32"
        super().test_an_answer_is_that_of_its_prompt_alone_whatever_lengths_are_beside_it(subject)

    @pytest.fixture
    def subject(self, generate: Engine) -> Subject:
        import ctranslate2

        folder = generate._folder.path  # type: ignore[attr-defined]

        def direct(prompts: Sequence[list[int]]) -> list[Any]:
            library = ctranslate2.Generator(str(folder), compute_type="int8", intra_threads=1)
            words = [[TOKENS[token] for token in prompt] for prompt in prompts]
            results = [
                library.generate_batch(
                    [prompt], max_length=6, include_prompt_in_result=False, sampling_topk=1
                )
                for prompt in words
            ]
            return [result[0].sequences_ids[0] for result in results]

        return Subject(
            generate,
            GREEDY,
            PROMPTS,
            6,
            direct,
            breaks=lambda: setattr(generate, "_generator", _Broken()),
            oversized=[5] * 5000,
            bad_token=9_999,
        )


class TestHidden(Conformance):
    @pytest.fixture
    def subject(self, hidden: Engine) -> Subject:
        import onnxruntime

        path = hidden._folder.path / "trunk.onnx"  # type: ignore[attr-defined]

        def direct(prompts: Sequence[list[int]]) -> list[Any]:
            session = onnxruntime.InferenceSession(str(path))
            states = [session.run(["hidden_2"], feed(prompt, len(prompt)))[0] for prompt in prompts]
            return [state.reshape(-1, state.shape[-1])[-1] for state in states]

        return Subject(
            hidden,
            {"kind": "hidden", "layers": [2], "pooling": "last"},
            PROMPTS,
            0,
            direct,
            breaks=lambda: setattr(hidden, "_infer", _Broken().infer),
            oversized=[5] * 5000,
            bad_token=9_999,
            tolerance=FP16 * 10,
        )


class TestEmbed(Conformance):
    @pytest.fixture
    def subject(self, embed: Engine) -> Subject:
        import onnxruntime

        path = embed._folder.path / "trunk.onnx"  # type: ignore[attr-defined]

        def direct(prompts: Sequence[list[int]]) -> list[Any]:
            session = onnxruntime.InferenceSession(str(path))
            means = [
                session.run(["tokens"], {k: v[None] for k, v in feed(text, len(text)).items()})[0][
                    0
                ].mean(0)
                for text in prompts
            ]
            return [mean / np.linalg.norm(mean) for mean in means]

        return Subject(
            embed,
            {"kind": "embed", "pooling": "mean", "normalise": True},
            TEXTS,
            0,
            direct,
            breaks=lambda: setattr(embed, "_infer", _Broken().infer),
            oversized=[4] * 600,
            bad_token=len(WORDS) + 100,
            tolerance=FP16,
        )


class TestScripted(Conformance):
    @pytest.fixture(params=[False, True], ids=["steps", "continuous"])
    def subject(self, request: pytest.FixtureRequest) -> Subject:
        engine = ScriptedEngine(continuous=request.param, script=Script(step_s=1e-5))
        engine.open()
        return Subject(
            engine,
            GREEDY,
            PROMPTS,
            6,
            lambda prompts: [expected_output(prompt, 6, engine.vocab_size) for prompt in prompts],
            breaks=lambda: setattr(engine.script, "fail_at_poll", engine.polls + 1),
            oversized=[5] * 600,
            bad_token=engine.vocab_size,
        )


class TestVllmOverStandin(Conformance):
    """Proves our half only: vLLM itself runs this suite in tests/gpu."""

    @pytest.fixture
    def subject(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Subject]:
        made = VllmOverStandin(tmp_path / "tiny", monkeypatch)
        engine = made.open()

        def direct(prompts: Sequence[list[int]]) -> list[Any]:
            asked = [{"prompt_token_ids": prompt} for prompt in prompts]
            params = [engine._runtime.SamplingParams(max_tokens=6, stop_token_ids=[EOS])] * len(
                prompts
            )
            outputs = [output.outputs[0] for output in engine.llm.generate(asked, params)]
            return [
                output.token_ids[:-1] if output.finish_reason == "stop" else output.token_ids
                for output in outputs
            ]

        def breaks() -> None:
            engine.llm.llm_engine.resources.engine_dead = True

        yield Subject(engine, GREEDY, PROMPTS, 6, direct, breaks, [5] * 101, VOCAB)
        engine.close()


def feed(prompt: list[int], length: int) -> dict[str, np.ndarray]:
    """Inputs of a trunk for one sequence by itself."""
    return {
        "ids": np.array(prompt, np.int64),
        "seg": np.zeros(length, np.int64),
        "pos": np.arange(length, dtype=np.int64),
    }

"""The shipped engines on the shipped models against references that share no code with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from fabric_pipelines.models import ModelFiles, Tokeniser
from fabric_pipelines.worker.engines.door import Engine
from fabric_pipelines.worker.engines.registry import ENGINES
from fabric_pipelines.worker.engines.tasks import tasks_of
from tests.reference_models import ReferenceBert, ReferenceLlama, relative_error
from tests.tiny_models import drain, lease_of

GREEDY = {"kind": "generate", "temperature": 0.0}
EMBED = {"kind": "embed", "pooling": "mean", "normalise": True}
LAYERS = [0, 8, 16, 30]
TEXTS = ["A cat sleeps.", "The capital of France is Paris.", "Water boils at 100 degrees."]
MIDDLE = 1  # the reference takes seconds a sentence; this one has neighbours on both sides
BATCH_TOLERANCE = 1e-4
REFERENCE_TOLERANCE = 1e-3  # fp16 of the completion is 4.9e-4 of it
MINILM_HEADS = 12
NEW = 12


@pytest.fixture(scope="module")
def reference(smollm2: ModelFiles) -> ReferenceLlama:
    return ReferenceLlama(smollm2.sources / smollm2.spec.weights.name)


@pytest.fixture(scope="module")
def truth(reference: ReferenceLlama, smollm2_tokeniser: Tokeniser) -> np.ndarray:
    """Residual stream [31, T, 576] of the middle text in float64."""
    return reference.hidden(smollm2_tokeniser.encode(TEXTS)[MIDDLE])


# ---- generation


def test_tokens_through_the_door_are_those_of_the_runtime_itself(
    generate: Engine, smollm2: ModelFiles, smollm2_tokeniser: Tokeniser
) -> None:
    import ctranslate2

    prompts = asked(smollm2_tokeniser)
    shared = common_prefix(prompts)
    generator = ctranslate2.Generator(
        str(smollm2.parts["ctranslate2-int8"]), compute_type="int8", intra_threads=2
    )
    direct = greedy(
        generator, smollm2, [prompt[shared:] for prompt in prompts], prompts[0][:shared]
    )
    generate.submit(lease_of(prompts, GREEDY, new=NEW))
    rows = drain(generate)
    for task, tokens in enumerate(direct):
        ended = tokens[-1] == smollm2_tokeniser.eos_id
        assert rows[task]["output"] == tokens[: -1 if ended else None]
        assert rows[task]["finish_reason"] == ("stop" if ended else "length")


def test_what_a_batch_shares_or_who_is_beside_it_changes_no_token_of_an_exact_sum(
    smollm2: ModelFiles, smollm2_tokeniser: Tokeniser
) -> None:
    """In fp32. With int8 the runtime's own products depend on the shape of the batch where the processor has no
    exact instruction for them, and a greedy choice that hangs on a hair may then fall the other way."""
    import ctranslate2

    prompts = asked(smollm2_tokeniser)
    shared = common_prefix(prompts)
    assert shared >= 8, "the engine would not share so short a prefix"
    generator = ctranslate2.Generator(
        str(smollm2.parts["ctranslate2-int8"]), compute_type="float32", intra_threads=2
    )
    alone = [greedy(generator, smollm2, [prompt])[0] for prompt in prompts]
    assert greedy(generator, smollm2, prompts) == alone
    parts = [prompt[shared:] for prompt in prompts]
    assert greedy(generator, smollm2, parts, prompts[0][:shared]) == alone


def asked(tokeniser: Tokeniser) -> list[list[int]]:
    return sorted(tokeniser.encode_chat(["Say yes.", "Count to five.", "Name a colour."]), key=len)


def common_prefix(prompts: list[list[int]]) -> int:
    """Tokens that all of them start with; each keeps one of its own."""
    least = min(map(len, prompts)) - 1
    return next((n for n in range(least) if len({prompt[n] for prompt in prompts}) > 1), least)


def greedy(
    generator: Any, smollm2: ModelFiles, prompts: list[list[int]], shared: Sequence[int] = ()
) -> list[list[int]]:
    """Token ids by the runtime itself, its end token included."""
    folder = smollm2.parts["ctranslate2-int8"]
    vocabulary = json.loads((folder / "vocabulary.json").read_text())
    results = generator.generate_batch(
        [[vocabulary[token] for token in prompt] for prompt in prompts],
        static_prompt=[vocabulary[token] for token in shared] or None,
        cache_static_prompt=False,
        max_length=NEW, sampling_topk=1, include_prompt_in_result=False, return_end_token=True,
    )  # fmt: skip
    return [result.sequences_ids[0] for result in results]


def test_a_simple_question_gets_a_sensible_answer(
    generate: Engine, smollm2_tokeniser: Tokeniser
) -> None:
    asked = smollm2_tokeniser.encode_chat(["What is the capital of France?"])
    begun = smollm2_tokeniser.encode(["The capital of France is"])
    generate.submit(lease_of([*asked, *begun], GREEDY, new=[24, 4]))
    rows = drain(generate)
    answer, continued = smollm2_tokeniser.decode([rows[task]["output"] for task in (0, 1)])
    assert "Paris" in answer
    assert rows[0]["finish_reason"] == "stop"
    assert "Paris" in continued
    assert rows[1]["finish_reason"] == "length"


def test_the_next_token_is_the_references_choice(
    generate: Engine,
    smollm2_tokeniser: Tokeniser,
    reference: ReferenceLlama,
    truth: np.ndarray,
) -> None:
    """int8 weights, so one token and not numbers. A causal model's states do not depend on what follows, so the
    states of the whole sentence hold those of its beginning."""
    whole, begun = smollm2_tokeniser.encode([TEXTS[MIDDLE], TEXTS[MIDDLE].removesuffix(" Paris.")])
    assert whole[: len(begun)] == begun
    generate.submit(lease_of([begun], GREEDY, new=1))
    logits = reference.logits(truth[-1, len(begun) - 1 : len(begun)])[0]
    assert drain(generate)[0]["output"] == [int(logits.argmax())]


# ---- hidden states


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_hidden_states_equal_the_reference(
    hidden: Engine, smollm2_tokeniser: Tokeniser, truth: np.ndarray, pooling: str
) -> None:
    prompts = smollm2_tokeniser.encode(TEXTS)
    hidden.submit(lease_of(prompts, {"kind": "hidden", "layers": LAYERS, "pooling": pooling}))
    found = np.array(drain(hidden)[MIDDLE]["vector"], np.float64).reshape(len(LAYERS), -1)
    pooled = truth[LAYERS, -1] if pooling == "last" else truth[LAYERS].mean(1)
    for mine, theirs in zip(found, pooled, strict=True):
        assert relative_error(mine, theirs) < REFERENCE_TOLERANCE


def test_a_shallow_session_gives_the_same_states_as_the_full_one(
    hidden: Engine, smollm2_tokeniser: Tokeniser
) -> None:
    prompts = smollm2_tokeniser.encode(TEXTS)
    deep = tasks_of(lease_of(prompts, {"kind": "hidden", "layers": [8, 30], "pooling": "last"}))
    shallow = tasks_of(lease_of(prompts, {"kind": "hidden", "layers": [8], "pooling": "last"}))
    full = hidden.vectors(deep)[:, :576]  # type: ignore[attr-defined]
    assert relative_error(hidden.vectors(shallow), full) < BATCH_TOLERANCE  # type: ignore[attr-defined]


def test_a_row_alone_equals_the_row_in_company(
    hidden: Engine, smollm2_tokeniser: Tokeniser
) -> None:
    prompts = smollm2_tokeniser.encode(TEXTS)
    for pooling in ("last", "mean"):
        sampling = {"kind": "hidden", "layers": [30], "pooling": pooling}
        tasks = tasks_of(lease_of(prompts, sampling))
        together = hidden.vectors(tasks)  # type: ignore[attr-defined]
        alone = hidden.vectors(tasks[1:2])  # type: ignore[attr-defined]
        assert relative_error(together[1], alone[0]) < BATCH_TOLERANCE


# ---- embeddings


def test_embeddings_equal_the_reference(
    embed: Engine, minilm: ModelFiles, minilm_tokeniser: Tokeniser
) -> None:
    prompts = minilm_tokeniser.encode(TEXTS)
    embed.submit(lease_of(prompts, EMBED))
    rows = drain(embed)
    reference = ReferenceBert(minilm.sources / minilm.spec.weights.name, MINILM_HEADS)
    for task, prompt in enumerate(prompts):
        found = np.array(rows[task]["vector"], np.float64)
        assert relative_error(found, reference.embedding(prompt)) < REFERENCE_TOLERANCE


def test_a_text_alone_equals_the_text_in_company(
    embed: Engine, minilm_tokeniser: Tokeniser
) -> None:
    tasks = tasks_of(lease_of(minilm_tokeniser.encode(TEXTS), EMBED))
    together = embed.vectors(tasks)  # type: ignore[attr-defined]
    for row, task in zip(together, tasks, strict=True):
        alone = embed.vectors([task])[0]  # type: ignore[attr-defined]
        assert relative_error(row, alone) < BATCH_TOLERANCE


def test_like_texts_lie_closer_than_unlike_ones(embed: Engine, minilm_tokeniser: Tokeniser) -> None:
    texts = ["A man is eating food.", "A man eats a meal.", "The stock market fell today."]
    embed.submit(lease_of(minilm_tokeniser.encode(texts), EMBED))
    rows = drain(embed)
    v = np.array([rows[task]["vector"] for task in range(3)], np.float32)
    assert v[0] @ v[1] > 0.8 > 0.2 > v[0] @ v[2]


# ---- what the registry promises


def test_registry_and_files_agree_on_sizes(
    generate: Engine, hidden: Engine, embed: Engine, smollm2: ModelFiles, minilm: ModelFiles
) -> None:
    from fabric_pipelines.models import contents

    for engine in (generate, hidden, embed):
        spec = ENGINES[engine.name]
        files = smollm2 if spec.model == smollm2.name else minilm
        facts = contents(files.parts[spec.part])["facts"]
        assert facts["vocab_size"] == spec.vocab_size
        if spec.dim:
            assert facts["dim"] == spec.dim
        if spec.layers:
            assert facts["layers"] == spec.layers

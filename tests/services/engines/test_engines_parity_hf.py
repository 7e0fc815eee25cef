"""Parity with Hugging Face transformers on torch (extra `parity`), which shares no code and no file format path
with our converters. Skips where torch is not installed; FABRIC_REQUIRE_PARITY=1 in CI makes that a failure.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from fabric_pipelines.models import ModelFiles, Tokeniser
from fabric_pipelines.worker.engines.door import Engine
from tests.reference_models import relative_error
from tests.tiny_models import drain, lease_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of transformers and torch, about themselves
]
TEXTS = ["The capital of France is Paris.", "Water boils at 100 degrees.", "A cat sleeps."]
LAYERS = [
    0,
    8,
    16,
    29,
]  # transformers applies the final norm to its last entry, so 30 is not shown there
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def libraries() -> tuple[Any, Any]:
    try:
        import torch
        import transformers
    except ImportError as fault:
        reason = f'parity needs `pip install "fabric-pipelines[parity]"` ({fault})'
        if os.environ.get("CI") == "true" and os.environ.get("FABRIC_REQUIRE_PARITY") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return torch, transformers


@pytest.fixture(scope="module")
def llama(libraries: tuple[Any, Any], smollm2: ModelFiles) -> Any:
    torch, transformers = libraries
    return transformers.AutoModelForCausalLM.from_pretrained(
        smollm2.sources, gguf_file=smollm2.spec.weights.name, dtype=torch.float32
    ).eval()


def test_hidden_states_equal_those_of_transformers(
    libraries: tuple[Any, Any], llama: Any, hidden: Engine, smollm2_tokeniser: Tokeniser
) -> None:
    torch, _ = libraries
    prompts = smollm2_tokeniser.encode(TEXTS)
    hidden.submit(lease_of(prompts, {"kind": "hidden", "layers": LAYERS, "pooling": "last"}))
    rows = drain(hidden)
    worst = 0.0
    for task, prompt in enumerate(prompts):
        truth = _last_states(torch, llama, prompt)[LAYERS]
        found = np.array(rows[task]["vector"], np.float64).reshape(truth.shape)
        worst = max(worst, *(relative_error(a, b) for a, b in zip(found, truth, strict=True)))
    assert worst < TOLERANCE


def _last_states(torch: Any, llama: Any, prompt: list[int]) -> np.ndarray:
    """[31, 576] of the last token. transformers applies the final norm to its last entry, so that the state
    behind the last block is taken by a hook."""
    seen: list[Any] = []
    hook = llama.model.layers[-1].register_forward_hook(
        lambda module, given, made: seen.append(made[0] if isinstance(made, tuple) else made)
    )
    with torch.no_grad():
        states = llama.model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    hook.remove()
    return np.stack([state[0, -1].numpy() for state in (*states[:-1], seen[0])])


def test_the_first_generated_token_is_that_of_transformers(
    libraries: tuple[Any, Any], llama: Any, generate: Engine, smollm2_tokeniser: Tokeniser
) -> None:
    torch, _ = libraries
    prompts = smollm2_tokeniser.encode_chat(["What is the capital of France?", "Say hello."])
    generate.submit(lease_of(prompts, {"kind": "generate", "temperature": 0.0}, new=1))
    rows = drain(generate)
    for task, prompt in enumerate(prompts):
        with torch.no_grad():
            choice = int(llama(torch.tensor([prompt])).logits[0, -1].argmax())
        assert rows[task]["output"] == [choice]


def test_chat_ids_are_those_of_the_models_own_template(
    libraries: tuple[Any, Any], smollm2: ModelFiles, smollm2_tokeniser: Tokeniser
) -> None:
    _, transformers = libraries
    theirs = transformers.AutoTokenizer.from_pretrained(
        smollm2.sources, gguf_file=smollm2.spec.weights.name
    )
    for text in ("What is 12 + 345?", "naïve – 東京 😀\n\n  indented\ttabs", "don't stop"):
        told = theirs.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        assert smollm2_tokeniser.encode_chat([text])[0] == theirs(told)["input_ids"]
        assert smollm2_tokeniser.encode([text])[0] == theirs(text)["input_ids"]


def test_embeddings_equal_those_of_transformers(
    libraries: tuple[Any, Any], minilm: ModelFiles, embed: Engine, minilm_tokeniser: Tokeniser
) -> None:
    torch, transformers = libraries
    bert = transformers.BertModel.from_pretrained(minilm.sources, add_pooling_layer=False).eval()
    prompts = minilm_tokeniser.encode(TEXTS)
    embed.submit(lease_of(prompts, {"kind": "embed", "pooling": "mean", "normalise": True}))
    rows = drain(embed)
    for task, prompt in enumerate(prompts):
        with torch.no_grad():
            mean = bert(torch.tensor([prompt])).last_hidden_state[0].mean(0).numpy()
        found = np.array(rows[task]["vector"], np.float64)
        assert relative_error(found, mean / np.linalg.norm(mean)) < TOLERANCE

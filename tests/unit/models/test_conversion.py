"""Converted graphs compute what the papers say, packed or not; on tiny models with random weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from fabric_pipelines import models
from fabric_pipelines.models.catalogue import ModelSpec
from fabric_pipelines.models.gguf_llama import GgufLlama, deinterleaved
from fabric_pipelines.models.onnx_graph import ALIGN_BYTES, truncated
from tests.reference_models import ReferenceBert, ReferenceLlama, relative_error
from tests.tiny_models import BERT_HEADS, LAYERS, TOKENS

ctranslate2 = pytest.importorskip("ctranslate2")
onnxruntime = pytest.importorskip("onnxruntime")
FLOAT32_TOLERANCE = 1e-5  # eps 6e-8 times sums over at most 96 terms, three blocks deep
PROMPTS = [[5, 9, 200, 17, 30], [7], [261, 3, 3, 8, 120, 44, 90, 11]]


@pytest.fixture(scope="module")
def parts(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_folder: Path,
    tiny_llama: ModelSpec,
    tiny_bert: ModelSpec,
) -> dict[str, dict[str, Path]]:
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        specs = {spec.name: spec for spec in (tiny_llama, tiny_bert)}
        patch.setattr("fabric_pipelines.models.catalogue.MODELS", specs)
        return {
            name: dict(models.pull(name, cache, source=str(tiny_folder)).parts) for name in specs
        }


@pytest.fixture(scope="module")
def reference(tiny_folder: Path, tiny_llama: ModelSpec) -> ReferenceLlama:
    return ReferenceLlama(tiny_folder / "tiny.gguf")


def _session(path: Path | bytes) -> object:
    return onnxruntime.InferenceSession(path if isinstance(path, bytes) else str(path))


def _packed(prompts: list[list[int]]) -> dict[str, np.ndarray]:
    return {
        "ids": np.concatenate(prompts),
        "seg": np.repeat(np.arange(len(prompts)), [len(p) for p in prompts]),
        "pos": np.concatenate([np.arange(len(p)) for p in prompts]),
    }


def test_every_layer_of_the_packed_trunk_equals_the_reference(
    parts: dict[str, dict[str, Path]], reference: ReferenceLlama
) -> None:
    session = _session(parts["tiny-llama"]["onnxruntime-fp32"] / "trunk.onnx")
    states = np.stack(session.run(None, _packed(PROMPTS)))
    start = 0
    for prompt in PROMPTS:
        mine = states[:, start : start + len(prompt)]
        assert relative_error(mine, reference.hidden(prompt)) < FLOAT32_TOLERANCE
        start += len(prompt)


def test_a_truncated_trunk_gives_the_same_states_and_carries_less(
    parts: dict[str, dict[str, Path]], reference: ReferenceLlama, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = parts["tiny-llama"]["onnxruntime-fp32"]
    graph = truncated(folder / "trunk.onnx", "hidden_1")
    names = {tensor.name for tensor in onnx.load_from_string(graph).graph.initializer}
    assert "b0.down" in names
    assert not any(name.startswith("b1.") for name in names)
    monkeypatch.chdir(folder)
    (state,) = _session(graph).run(["hidden_1"], _packed(PROMPTS[:1]))
    assert relative_error(state, reference.hidden(PROMPTS[0])[1]) < FLOAT32_TOLERANCE


def test_the_int8_model_agrees_with_the_reference_within_quantisation(
    parts: dict[str, dict[str, Path]], reference: ReferenceLlama
) -> None:
    folder = parts["tiny-llama"]["ctranslate2-int8"]
    generator = ctranslate2.Generator(str(folder), compute_type="float32")
    logits = np.array(generator.forward_batch([[TOKENS[token] for token in PROMPTS[0]]]))[0]
    # 8 bits a weight are 1/254 of a row's largest; it grows by a few units over three blocks.
    assert relative_error(logits, reference.logits(reference.hidden(PROMPTS[0])[-1])) < 0.05


def test_the_encoder_equals_the_reference_packed_or_padded(
    parts: dict[str, dict[str, Path]], tiny_folder: Path
) -> None:
    session = _session(parts["tiny-bert"]["onnxruntime-fp32"] / "trunk.onnx")
    reference = ReferenceBert(tiny_folder / "model.safetensors", BERT_HEADS)
    long, short = [2, 4, 5, 6, 3], [2, 7, 3]
    packed = {name: value[None] for name, value in _packed([long, short]).items()}
    padded = {
        "ids": np.array([long, [*short, 0, 0]]),
        "seg": np.array([[0] * 5, [0, 0, 0, 1, 1]]),
        "pos": np.array([range(5), [0, 1, 2, 0, 0]]),
    }
    (row,) = session.run(None, packed)[0]
    two = session.run(None, padded)[0]
    for found, prompt in (
        (row[:5], long), (row[5:], short), (two[0], long), (two[1, :3], short)
    ):  # fmt: skip
        assert relative_error(found, reference.hidden(prompt)) < FLOAT32_TOLERANCE


def test_weights_lie_aligned_in_one_side_file(parts: dict[str, dict[str, Path]]) -> None:
    folder = parts["tiny-llama"]["onnxruntime-fp32"]
    graph = onnx.load(str(folder / "trunk.onnx"), load_external_data=False).graph
    kept = [dict((e.key, e.value) for e in t.external_data) for t in graph.initializer]
    offsets = [int(entry["offset"]) for entry in kept if entry]
    assert len(offsets) == 1 + 6 * LAYERS  # the table; two norms and four products a block
    assert {offset % ALIGN_BYTES for offset in offsets} == {0}


def test_a_conversion_gives_the_same_bytes_every_time(
    tmp_path: Path, tiny_folder: Path, parts: dict[str, dict[str, Path]], known: object
) -> None:
    again = models.pull("tiny-llama", tmp_path, source=str(tiny_folder)).parts
    for part, folder in again.items():
        assert models.contents(folder) == models.contents(parts["tiny-llama"][part])


def test_deinterleaving_moves_pairs_to_halves() -> None:
    rows = np.arange(8, dtype=np.float32).reshape(8, 1)
    assert deinterleaved(rows, heads=2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_tensor_may_be_scaled_in_place(tiny_folder: Path, tiny_llama: ModelSpec) -> None:
    """The mapped file is read-only, and an unquantised tensor used to come back as a view of it."""
    weight = GgufLlama(tiny_folder / "tiny.gguf").tensor("token_embd.weight")
    weight *= 2
    assert weight.flags.writeable

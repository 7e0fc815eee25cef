"""The reference engine on CPU: the library's own answers, no padding in a pass, refusals by field."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fabric_pipelines.errors import (
    DeviceRefused,
    DigestMismatch,
    EngineFailed,
    ManifestRefused,
    MissingDependency,
)
from fabric_pipelines.models.recipes import Limits
from fabric_pipelines.records.manifest import EngineManifest
from fabric_pipelines.worker.engines import registry, varlen
from fabric_pipelines.worker.engines.checkpoint import describe
from fabric_pipelines.worker.engines.tasks import tasks_of
from tests.reference_models import ReferenceBert, ReferenceLlama, relative_error
from tests.tiny_models import LAYERS, drain, lease_of
from tests.unit.engines.test_conformance import GREEDY, PROMPTS, TEXTS
from tests.unit.engines.transformers_tiny import (
    EMBED,
    EOS,
    GENERATE,
    HIDDEN,
    TinyCheckpoints,
    edit_manifest,
    libraries,
    opened,
    write_checkpoints,
)

pytestmark = pytest.mark.filterwarnings("default")  # what torch says about itself is not ours
FIELDS = tuple(EngineManifest.__dataclass_fields__)
ALL = {"kind": "hidden", "layers": list(range(LAYERS + 1)), "pooling": "last"}
MEAN = {"kind": "embed", "pooling": "mean", "normalise": True}
EXACT = 2e-6  # float32 over 3 layers, relative to the largest value


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoints:
    return write_checkpoints(tmp_path_factory.mktemp("transformers"))


@pytest.fixture(scope="module")
def generate(tiny: TinyCheckpoints) -> Iterator[Any]:
    with opened(GENERATE, tiny.cache) as engine:
        yield engine


@pytest.fixture(scope="module")
def hidden(tiny: TinyCheckpoints) -> Iterator[Any]:
    with opened(HIDDEN, tiny.cache) as engine:
        yield engine


@pytest.fixture(scope="module")
def embed(tiny: TinyCheckpoints) -> Iterator[Any]:
    with opened(EMBED, tiny.cache) as engine:
        yield engine


# ---- generation


def test_greedy_tokens_are_those_of_the_library_one_by_one(
    tiny: TinyCheckpoints, generate: Any
) -> None:
    torch, transformers = libraries()
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny.folder(GENERATE)).eval()
    caps = [7, 3, 12, 5]
    generate.submit(lease_of(PROMPTS, GREEDY, new=caps))
    rows = drain(generate)
    for task, (prompt, cap) in enumerate(zip(PROMPTS, caps, strict=True)):
        with torch.no_grad():
            made = model.generate(
                torch.tensor([prompt]), max_new_tokens=cap, do_sample=False, eos_token_id=EOS
            )
        told = made[0, len(prompt) :].tolist()
        reason = "stop" if told[-1] == EOS else "length"
        told = told[:-1] if reason == "stop" else told
        assert (rows[task]["output"], rows[task]["finish_reason"]) == (told, reason)


def test_an_end_token_stops_and_ignoring_it_fills_the_cap(
    tiny: TinyCheckpoints, tmp_path: Path
) -> None:
    """The end token is made one that the model does say: the third of an answer."""
    own = tiny.copied(tmp_path / "models")
    with opened(GENERATE, own.cache) as engine:
        engine.submit(lease_of([PROMPTS[2]], GREEDY, new=8))
        (whole,) = (row["output"] for row in drain(engine).values())
    end = next(n for n in range(1, 8) if whole[n] not in whole[:n])
    describe(own.folder(GENERATE), Limits(8, 256, 500, 512), version=_version(own),
             weight_quantisation="none", kv_quantisation="none", eos_ids=[whole[end]])  # fmt: skip
    with opened(GENERATE, own.cache) as engine:
        engine.submit(lease_of([PROMPTS[2]] * 2, GREEDY, new=8))
        engine.submit(lease_of([PROMPTS[2]], {**GREEDY, "ignore_eos": True}, new=8, first_id=2))
        rows = drain(engine)
        generated = engine.stats.generated_tokens
    assert [(rows[n]["output"], rows[n]["finish_reason"]) for n in range(3)] == [
        (whole[:end], "stop"),
        (whole[:end], "stop"),
        (whole, "length"),
    ]
    assert generated == 2 * (end + 1) + 8


def _version(tiny: TinyCheckpoints) -> str:
    return registry.construct_engine(GENERATE, cache=tiny.cache, threads=1).manifest.version


def test_padding_of_a_step_is_counted_and_a_penalty_forbids_it(generate: Any) -> None:
    before = generate.stats.padded_tokens
    generate.submit(lease_of([[5, 9, 200], [5, 9, 200, 17, 30]], GREEDY, new=2))
    rows = drain(generate)
    assert [rows[n]["padded_tokens"] for n in range(2)] == [2, 0]
    assert generate.stats.padded_tokens - before == 2
    penalised = {**GREEDY, "repetition_penalty": 1.3}
    generate.submit(lease_of([[5, 9, 200], [5, 9, 200, 17, 30], [8, 8, 9]], penalised, new=2))
    rows = drain(generate)
    assert [rows[n]["padded_tokens"] for n in range(3)] == [0, 0, 0]
    assert generate.stats.padded_tokens - before == 2


def test_a_sampled_step_repeats_and_other_rows_draw_others(generate: Any) -> None:
    sampling = {"kind": "generate", "temperature": 1.5, "top_k": 50, "top_p": 0.95, "seed": 4}

    def drawn(first_id: int) -> list[Any]:
        generate.submit(lease_of([[5, 9, 7]] * 3, sampling, new=10, first_id=first_id))
        return [row["output"] for row in drain(generate).values()]

    first = drawn(0)
    drawn(50)
    assert drawn(0) == first
    assert drawn(100) != first
    assert len({tuple(output) for output in first}) > 1


# ---- single passes


def test_every_layer_equals_the_float64_reference(tiny: TinyCheckpoints, hidden: Any) -> None:
    reference = ReferenceLlama(tiny.gguf)
    vectors = hidden.vectors(tasks_of(lease_of(PROMPTS, ALL)))
    for row, prompt in zip(vectors, PROMPTS, strict=True):
        truth = reference.hidden(prompt)[:, -1]
        assert relative_error(row.reshape(truth.shape), truth) < EXACT


def test_alone_or_among_others_a_sequence_gives_the_same_states(hidden: Any, embed: Any) -> None:
    draw = np.random.default_rng(5)
    lengths = [1, 2, 31, 3, 100, 1, 64]
    for engine, sampling, vocab in (
        (hidden, {**ALL, "pooling": "mean"}, 264),
        (hidden, ALL, 264),
        (embed, MEAN, 13),
    ):
        prompts = [draw.integers(0, vocab, n).tolist() for n in lengths]
        together = engine.vectors(tasks_of(lease_of(prompts, sampling)))
        for row, prompt in zip(together, prompts, strict=True):
            alone = engine.vectors(tasks_of(lease_of([prompt], sampling)))[0]
            assert relative_error(row, alone) < EXACT


def test_embeddings_equal_the_float64_reference(tiny: TinyCheckpoints, embed: Any) -> None:
    reference = ReferenceBert(tiny.bert, heads=4)
    found = embed.vectors(tasks_of(lease_of(TEXTS, MEAN)))
    for row, text in zip(found, TEXTS, strict=True):
        assert relative_error(row, reference.embedding(text)) < EXACT
    plain = embed.vectors(tasks_of(lease_of(TEXTS, {**MEAN, "normalise": False})))
    assert relative_error(plain[0], reference.hidden(TEXTS[0]).mean(0)) < EXACT


def test_a_pass_ends_at_the_deepest_layer_asked_for(hidden: Any) -> None:
    runs: list[int] = []
    hooks = [
        block.register_forward_hook(lambda *_, n=n: runs.append(n))
        for n, block in enumerate(hidden._blocks, 1)
    ]
    for layers in ([0], [1], [2, 0], [LAYERS]):
        runs.clear()
        vectors = hidden.vectors(tasks_of(lease_of(PROMPTS[:1], {**ALL, "layers": layers})))
        assert runs == list(range(1, max(layers) + 1))
        assert vectors.shape == (1, 64 * len(layers))
    for hook in hooks:
        hook.remove()
    assert len(hidden._model.layers) == LAYERS


def test_a_step_is_one_row_without_padding(hidden: Any) -> None:
    seen: list[tuple[int, ...]] = []
    hook = hidden._embedding.register_forward_hook(lambda _, given, made: seen.append(made.shape))
    hidden.submit(lease_of(PROMPTS, ALL))
    rows = drain(hidden)
    hook.remove()
    assert seen == [(1, sum(len(prompt) for prompt in PROMPTS), 64)]
    assert {row["padded_tokens"] for row in rows.values()} == {0}
    assert hidden.stats.padded_tokens == 0


def test_a_window_shorter_than_a_sequence_is_refused_not_ignored() -> None:
    torch, _ = libraries()
    states = torch.zeros(1, 1, 5, 4)
    ends, positions = varlen.laid_out([2, 3])
    packing = varlen.Packing((2, 3), torch.from_numpy(ends), torch.from_numpy(positions)[None])
    assert packing.positions.tolist() == [[0, 1, 0, 1, 2]]
    assert packing.ends.tolist() == [0, 2, 5]
    with pytest.raises(RuntimeError, match="3 tokens is longer than the model's window of 2"):
        varlen.attend(None, states, states, states, packing, 1.0, sliding_window=2)


@pytest.mark.parametrize(
    ("sampling", "new", "says"),
    [
        ({**ALL, "layers": [LAYERS + 1]}, 0, "do not exist; they go from 0 to 3"),
        ({**ALL, "pooling": "max"}, 0, "neither 'last' nor 'mean'"),
        (ALL, 4, "a single pass generates nothing"),
        (GREEDY, 0, "kind 'generate' is not served here, only 'embed' or 'hidden'"),
        ({**MEAN, "normalise": 1}, 0, "must be true or false"),
        ({**MEAN, "pooling": "last"}, 0, "trained with 'mean'"),
    ],
)
def test_a_pass_that_cannot_be_served_is_refused_per_task(
    hidden: Any, sampling: dict[str, Any], new: int, says: str
) -> None:
    hidden.submit(lease_of(PROMPTS[:1], sampling, new=new))
    (row,) = drain(hidden).values()
    assert row["status"] == "refused"
    assert says in row["error_text"]


# ---- opening


def test_random_weights_are_the_same_at_every_opening(
    tiny: TinyCheckpoints, tmp_path: Path
) -> None:
    own = tiny.copied(tmp_path / "models")
    (own.folder(HIDDEN) / "model.safetensors").unlink()
    describe(own.folder(HIDDEN), Limits(8, 256, 500, 512), version=_version(tiny),
             weight_quantisation="none", kv_quantisation="single_pass")  # fmt: skip
    found = []
    for _ in range(2):
        with opened(HIDDEN, own.cache) as engine:
            found.append(engine.vectors(tasks_of(lease_of(PROMPTS, ALL))))
    np.testing.assert_array_equal(*found)


UNKNOWN: dict[str, Any] = {
    "version": "abacus 1.0",
    "architecture": "AbacusForCausalLM",
    "weight_quantisation": "int3",
    "kv_quantisation": "int3",
    "world_size": "one",
    "max_batch_size": 0,
    "max_num_tokens": True,
    "max_input_len": 1.5,
    "max_seq_len": -1,
}
BEYOND = 10**12  # tokens; no memory holds as many
CONTRADICTS: dict[str, dict[str, Any]] = {
    "version": {"version": "transformers 0.1"},
    "architecture": {"architecture": "Qwen2ForCausalLM"},
    "weight_quantisation": {"weight_quantisation": "fp8"},
    "kv_quantisation": {"kv_quantisation": "fp8"},
    "world_size": {"world_size": 2},
    "max_batch_size": {"max_batch_size": BEYOND, "max_num_tokens": BEYOND},
    "max_num_tokens": {"max_num_tokens": BEYOND},
    "max_input_len": {"max_input_len": 5000, "max_seq_len": 5000},
    "max_seq_len": {"max_seq_len": 5000},
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("fault", ["missing", "unknown", "contradiction"])
def test_each_of_27_manifest_faults_is_refused_by_its_field(
    tiny: TinyCheckpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    field: str,
) -> None:
    own = tiny.copied(tmp_path / "models")
    changes = {"unknown": {field: UNKNOWN[field]}, "contradiction": CONTRADICTS[field]}.get(
        fault, {}
    )
    edit_manifest(own.folder(GENERATE), changes, without=field if fault == "missing" else "")
    look = registry.open_engine
    if fault != "contradiction":
        look = registry.construct_engine
        monkeypatch.setitem(sys.modules, "torch", None)
        monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ManifestRefused, match=field) as refusal:
        look(GENERATE, cache=own.cache, threads=1)
    assert field in refusal.value.fields
    assert set(refusal.value.fields) <= {field, *changes}


def test_what_an_opened_engine_says_agrees_on_all_nine_fields(generate: Any, embed: Any) -> None:
    for engine in (generate, embed):
        told = engine.introspect()
        assert tuple(told) == FIELDS
        assert not [name for name in FIELDS if told[name].denies(getattr(engine.manifest, name))]


def test_an_encoder_that_is_to_generate_is_refused(tiny: TinyCheckpoints, tmp_path: Path) -> None:
    own = tiny.copied(tmp_path / "models")
    edit_manifest(own.folder(EMBED), {"kv_quantisation": "none"})
    with pytest.raises(ManifestRefused, match="BertModel generates nothing") as refusal:
        registry.construct_engine(EMBED, cache=own.cache, threads=1)
    assert refusal.value.fields == ("kv_quantisation",)


def test_a_flipped_bit_and_a_broken_file_are_refused(tiny: TinyCheckpoints, tmp_path: Path) -> None:
    own = tiny.copied(tmp_path / "models")
    weights = own.folder(GENERATE) / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(DigestMismatch, match=f"fabric engine build {GENERATE}"):
        registry.open_engine(GENERATE, cache=own.cache, threads=1)
    weights.write_bytes(b"\xff" * 64)
    describe(own.folder(GENERATE), Limits(8, 256, 500, 512), version=_version(tiny),
             weight_quantisation="none", kv_quantisation="none")  # fmt: skip
    with pytest.raises(EngineFailed, match="cannot be loaded"):
        registry.open_engine(GENERATE, cache=own.cache, threads=1)


def test_weights_that_lack_a_tensor_are_refused_not_made_up(
    tiny: TinyCheckpoints, tmp_path: Path
) -> None:
    own = tiny.copied(tmp_path / "models")
    path = own.folder(HIDDEN) / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    describe(own.folder(HIDDEN), Limits(8, 256, 500, 512), version=_version(tiny),
             weight_quantisation="none", kv_quantisation="single_pass")  # fmt: skip
    with pytest.raises(EngineFailed, match=r"lack 1 tensors, first .*layers\.1\.mlp\.down_proj"):
        registry.open_engine(HIDDEN, cache=own.cache, threads=1)


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_a_missing_library_is_one_sentence_with_the_command(
    tiny: TinyCheckpoints, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependency) as refusal:
        registry.open_engine(GENERATE, cache=tiny.cache, threads=1)
    assert f"needs the package {package!r}" in str(refusal.value)
    assert 'pip install "fabric-pipelines[transformers]"' in str(refusal.value)


def test_without_a_card_cuda_is_refused_in_a_sentence(
    tiny: TinyCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch, _ = libraries()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    engine = registry.construct_engine(GENERATE, cache=tiny.cache, threads=1, device="cuda")
    assert engine.capabilities.device == "cuda"
    with pytest.raises(DeviceRefused, match="torch finds no device"):
        engine.open()

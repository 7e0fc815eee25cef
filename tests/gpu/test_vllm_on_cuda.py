"""vLLM itself behind the door: the conformance suite on a card, its true API against our contract, and its cache.

The model is two layers with weights drawn here: the next token is a fixed permutation of the last, by a wide margin, so
greedy answers do not hang on rounding and some chains run into the end token.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from fabric_pipelines.bench import supply
from fabric_pipelines.errors import ManifestRefused
from fabric_pipelines.models.recipes import Limits
from fabric_pipelines.worker.engines.checkpoint import describe
from fabric_pipelines.worker.engines.opening import read_folder
from fabric_pipelines.worker.engines.vllm import VllmEngine, VllmOptions
from tests.engine_conformance import Conformance, Subject
from tests.tiny_models import drain

# vLLM's own warnings are not ours to mend.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
FACTS = json.loads((Path(__file__).parents[1] / "contracts" / "vllm_0_25_1.json").read_text())
VOCAB, DIM, FFN, LAYERS, HEADS, KV_HEADS, EOS = 512, 256, 512, 2, 4, 2, 3
LIMITS = Limits(max_batch_size=8, max_num_tokens=512, max_input_len=200, max_seq_len=256)
GREEDY = {"kind": "generate", "temperature": 0.0}
NEW = 24


def _require_vllm() -> None:
    missing = [name for name in ("torch", "vllm") if importlib.util.find_spec(name) is None]
    if not missing:
        import torch

        if not torch.cuda.is_available():
            missing = ["a CUDA device"]
    if missing:
        said = f"needs {', '.join(missing)}"
        if os.environ.get("FABRIC_REQUIRE_GPU") == "1":
            pytest.fail(f"FABRIC_REQUIRE_GPU=1, and this {said}")
        pytest.skip(said)


def write_checkpoint(folder: Path) -> np.ndarray:
    """A Llama checkpoint in `folder`; returns the permutation that it has learnt, int64 [VOCAB]."""
    from safetensors.numpy import save_file

    draw = np.random.default_rng(7)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (0.3 * draw.normal(0, columns**-0.5, (rows, columns))).astype(np.float32)

    embedding = draw.normal(0, 1, (VOCAB, DIM)).astype(np.float32)
    follows = draw.permutation(VOCAB)
    head = np.empty_like(embedding)
    head[follows] = embedding
    kv = DIM * KV_HEADS // HEADS
    ones = np.ones(DIM, np.float32)
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": ones,
        "lm_head.weight": head,
    }
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        for part, rows, columns in (
            ("self_attn.q_proj", DIM, DIM),
            ("self_attn.k_proj", kv, DIM),
            ("self_attn.v_proj", kv, DIM),
            ("self_attn.o_proj", DIM, DIM),
            ("mlp.gate_proj", FFN, DIM),
            ("mlp.up_proj", FFN, DIM),
            ("mlp.down_proj", DIM, FFN),
        ):
            weights[f"{name}.{part}.weight"] = matrix(rows, columns)
        weights[f"{name}.input_layernorm.weight"] = ones
        weights[f"{name}.post_attention_layernorm.weight"] = ones
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": DIM,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return follows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    _require_vllm()
    folder = tmp_path_factory.mktemp("tiny-vllm")
    follows = write_checkpoint(folder)
    describe(folder, LIMITS, version=f"vllm {FACTS['source']['version']}",
             weight_quantisation="none", kv_quantisation="none", eos_ids=[EOS])  # fmt: skip
    return folder, follows


@pytest.fixture(scope="module", params=["ahead", "further", "stock"])
def engine(model: tuple[Path, np.ndarray], request: pytest.FixtureRequest) -> Iterator[VllmEngine]:
    """As we run it, as far ahead as benchmarks do, and with vLLM's own scheduler as it is."""
    options = VllmOptions(gpu_memory_share=0.2, kv_blocks=2048, eager=True)
    if request.param == "further":
        options = replace(options, steps_ahead=supply.STEPS_AHEAD)
    if request.param == "stock":
        options = replace(options, steps_ahead=1, whole_answers=False)
    opened = VllmEngine("tiny@vllm", read_folder(model[0]), options)
    opened.open()
    yield opened
    opened.close()


def chain(follows: np.ndarray, prompt: Sequence[int], new: int) -> tuple[list[int], str]:
    """What the permutation gives after `prompt`, and why it ends."""
    output: list[int] = []
    while len(output) < new:
        output.append(int(follows[output[-1] if output else prompt[-1]]))
        if output[-1] == EOS:
            return output[:-1], "stop"
    return output, "length"


def prompts_for(follows: np.ndarray) -> list[list[int]]:
    """Four prompts; the last runs into the end token after two others."""
    before = np.argsort(follows)
    third = int(before[before[before[EOS]]])
    return [[5, 9, 200, 17, 30], [7, 7], list(range(60, 140)), [6, 41, third]]


class TestVllm(Conformance):
    @pytest.fixture
    def subject(self, engine: VllmEngine, model: tuple[Path, np.ndarray]) -> Subject:
        import vllm

        def direct(prompts: Sequence[list[int]]) -> list[Any]:
            asked = [{"prompt_token_ids": prompt} for prompt in prompts]
            params = vllm.SamplingParams(
                max_tokens=NEW, temperature=0.0, detokenize=False, ignore_eos=True,
                stop_token_ids=[EOS],
            )  # fmt: skip
            outputs = [o.outputs[0] for o in engine.llm.generate(asked, params, use_tqdm=False)]
            return [
                list(o.token_ids)[:-1] if o.finish_reason == "stop" else list(o.token_ids)
                for o in outputs
            ]

        def breaks() -> None:
            cores = [
                child
                for child in psutil.Process().children(recursive=True)
                if "EngineCore" in " ".join([child.name(), *child.cmdline()])
            ]
            assert cores, "vLLM's scheduler is a process of its own"
            for child in cores:
                child.kill()

        return Subject(engine, GREEDY, prompts_for(model[1]), NEW, direct, breaks, [5] * 201, VOCAB)

    def test_a_shared_prefix_is_reused_as_the_engine_itself_says(self, subject: Subject) -> None:
        shared = [int(n) for n in np.random.default_rng(1).integers(10, 500, 96)]
        stats = subject.engine.stats
        before = stats.reused_tokens
        subject.engine.submit(subject.lease([[*shared, 20]]))
        drain(subject.engine)
        subject.engine.submit(subject.lease([[*shared, n] for n in (21, 22, 23)], first_id=1))
        drain(subject.engine)
        assert stats.reused_tokens - before == 3 * 96

    def test_tokens_and_reasons_are_those_of_the_permutation(
        self, subject: Subject, model: tuple[Path, np.ndarray]
    ) -> None:
        subject.engine.submit(subject.lease(subject.prompts))
        rows = drain(subject.engine)
        found = [(rows[n]["output"], rows[n]["finish_reason"]) for n in range(4)]
        assert found == [chain(model[1], prompt, NEW) for prompt in subject.prompts]
        assert found[3][1] == "stop"

    def test_the_profile_is_the_cards_own_count_of_blocks(self, subject: Subject) -> None:
        found = subject.engine.llm.llm_engine.vllm_config.cache_config  # type: ignore[attr-defined]
        assert subject.engine.profile.kv_cache_tokens == 2048 * found.block_size

    def test_a_wrong_length_is_refused_before_the_card_is_touched(
        self, model: tuple[Path, np.ndarray], tmp_path: Path
    ) -> None:
        folder = tmp_path / "other"
        folder.mkdir()
        for name in ("config.json", "contents.json", "model.safetensors"):
            (folder / name).symlink_to(model[0] / name)
        fields = json.loads((model[0] / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps({**fields, "max_seq_len": 300}))
        with pytest.raises(ManifestRefused, match="max_seq_len"):
            read_folder(folder)

    # Last: it kills vLLM's scheduler.
    test_death_in_mid_batch_is_said_and_loses_no_task = (
        Conformance.test_death_in_mid_batch_is_said_and_loses_no_task
    )


def test_the_contract_is_what_the_installed_package_says() -> None:
    _require_vllm()
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    assert vllm.__version__ == FACTS["source"]["version"]
    for name, call in (
        ("vllm.LLM", vllm.LLM.__init__),
        ("vllm.LLM.generate", vllm.LLM.generate),
        ("vllm.inputs.tokens_input", vllm.inputs.tokens_input),
        ("LLMEngine.add_request", LLMEngine.add_request),
        ("LLMEngine.abort_request", LLMEngine.abort_request),
    ):
        facts = FACTS["calls"][name]
        told = [p for p in inspect.signature(call).parameters if p not in ("self", "kwargs")]
        assert told == [*facts["positional"], *facts["keyword_only"]], name
    assert set(FACTS["fields"]["EngineArgs"]["names"]) == set(EngineArgs.__dataclass_fields__)
    assert set(FACTS["fields"]["SamplingParams"]["names"]) == set(
        vllm.SamplingParams.__struct_fields__
    )

"""vLLM's own scheduler class, made to run further ahead and to tell whole answers, over a model that is a formula.

Needs vLLM but computes nothing on a card: the test plays the engine core, which keeps so many batches in flight.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric_pipelines.worker.engines import vllm as vllm_engine

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]
SEQUENCES, STEP_TOKENS, BLOCK, GROUP, REQUESTS = 64, 2048, 16, 8, 150
ROOMY, TIGHT = 20_000, 1_200  # blocks of the cache: for all, and for fewer than run
ABORTED = {40: "r5", 60: "r20"}  # by step
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 152_064,
    "max_position_embeddings": 4096, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip


def token(request_id: str, position: int) -> int:
    return 10 + (int(request_id[1:]) * 7919 + position * 104_729) % 50_000


@pytest.fixture(scope="module")
def ahead() -> Iterator[Any]:
    if importlib.util.find_spec("vllm") is None:
        if os.environ.get("FABRIC_REQUIRE_GPU") == "1":
            pytest.fail("FABRIC_REQUIRE_GPU=1, and this needs vllm")
        pytest.skip("needs vllm")
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    yield importlib.import_module(vllm_engine.AHEAD)
    patch.undo()


def scheduler_of(scheduler: Any, folder: Path, blocks: int, steps: int) -> Any:
    import torch
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    (folder / "config.json").write_text(json.dumps(CONFIG))
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    cache.num_gpu_blocks = blocks
    config = VllmConfig(
        model_config=ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=4096),
        scheduler_config=SchedulerConfig(
            max_num_seqs=SEQUENCES, max_num_batched_tokens=STEP_TOKENS, max_model_len=4096,
            is_encoder_decoder=False, async_scheduling=True,
        ),
        cache_config=cache, device_config=DeviceConfig("cpu"),
        additional_config={vllm_engine.STEPS_AHEAD: steps},
    )  # fmt: skip
    assert config.max_concurrent_batches == 1 + steps
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    layers = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    return scheduler(
        vllm_config=config, kv_cache_config=layers, structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK, hash_block_size=BLOCK, log_stats=False,
    )  # fmt: skip


def requests() -> tuple[list[Any], dict[str, tuple[list[int], str]]]:
    """Requests, every third with a stop token somewhere, and what each must give."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    digest = get_hash_fn_by_name("sha256")
    init_none_hash(digest)
    draw, made, wanted = np.random.default_rng(3), [], {}
    for number in range(REQUESTS):
        name = f"r{number}"
        length, most = int(draw.integers(180, 540)), int(draw.integers(115, 345))
        params = SamplingParams(
            max_tokens=most, temperature=0.0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, ignore_eos=True
        )  # fmt: skip
        answer = [token(name, length + place) for place in range(most)]
        wanted[name] = (answer, "length")
        if number % 3 == 0:
            stop = answer[int(draw.integers(0, most))]
            params.stop_token_ids = [stop]
            wanted[name] = (answer[: answer.index(stop) + 1], "stop")
        prompt = draw.integers(10, 50_000, length).tolist()
        hasher = get_request_block_hasher(BLOCK, digest)
        made.append(Request(name, prompt, params, None, block_hasher=hasher))
    return made, wanted


def run(scheduler: Any, depth: int, aborted: dict[int, str]) -> tuple[Any, Any]:
    """(what each request gave, {"messages": outputs told, "preempted": times}); the core's loop with `depth` batches in flight."""
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import RequestStatus

    waiting, wanted = requests()
    given: dict[str, tuple[list[int], str]] = {name: ([], "") for name in wanted}
    flying: deque[tuple[Any, Any]] = deque()
    told = {"messages": 0, "preempted": 0}
    inside = steps = 0
    while waiting or inside:
        if SEQUENCES - inside >= GROUP:
            fresh, waiting = waiting[: SEQUENCES - inside], waiting[SEQUENCES - inside :]
            for request in fresh:
                scheduler.add_request(request)
            inside += len(fresh)
        if (name := aborted.get(steps, "")) in scheduler.requests:
            scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
            inside -= 1
        if scheduler.has_requests():
            batch, steps = scheduler.schedule(), steps + 1
            told["preempted"] += len(batch.preempted_req_ids or ())
            names = list(batch.num_scheduled_tokens)
            sampled = [
                [] if request.is_prefill_chunk else [token(request.request_id, request.num_computed_tokens)]
                for request in (scheduler.requests[name] for name in names)
            ]  # fmt: skip
            places = {name: place for place, name in enumerate(names)}
            output = ModelRunnerOutput(
                req_ids=names, req_id_to_index=places, sampled_token_ids=sampled, logprobs=None,
                prompt_logprobs_dict={}, pooler_output=[],
            )  # fmt: skip
            flying.append((batch, output))
            if len(flying) < depth:
                continue
        for message in scheduler.update_from_output(*flying.popleft()).values():
            for output in message.outputs:
                told["messages"] += 1
                tokens, _ = given[output.request_id]
                tokens.extend(output.new_token_ids)
                if output.finish_reason is not None:
                    given[output.request_id] = (tokens, str(output.finish_reason))
                    inside -= 1
    left = set(aborted.values())
    return (
        {name: answer for name, answer in given.items() if name not in left},
        {**told, "wanted": {name: answer for name, answer in wanted.items() if name not in left}},
    )


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("blocks", [ROOMY, TIGHT], ids=["roomy", "tight"])
def test_every_answer_is_whole_and_right_however_far_ahead(
    ahead: Any, tmp_path: Path, steps: int, blocks: int
) -> None:
    scheduler = scheduler_of(ahead.WholeAnswers, tmp_path, blocks, steps)
    given, told = run(scheduler, 1 + steps, ABORTED if blocks == ROOMY else {})
    assert given == told["wanted"]
    assert told["messages"] <= 2 * REQUESTS
    assert (told["preempted"] > 0) == (blocks == TIGHT)
    assert scheduler._held == {}
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == blocks - 1


def test_vllms_own_scheduler_gives_the_same(ahead: Any, tmp_path: Path) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    given, told = run(scheduler_of(AsyncScheduler, tmp_path, ROOMY, 1), 2, ABORTED)
    assert given == told["wanted"]
    assert told["messages"] > 100 * REQUESTS

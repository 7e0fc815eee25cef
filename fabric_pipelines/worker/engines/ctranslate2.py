"""Generation on CPU through CTranslate2 with int8 weights.

CTranslate2 has no in-flight refill: a batch runs until its last sequence ends. It forwards the prompt at once
only up to the shortest prompt of the batch and walks the rest token by token, so a step takes the
neighbours in length of the oldest task; what all prompts of a step start with is computed once. A finish reason is what the runtime reports: the end token it was
asked to return, or the cap it was given; anything else is an error of the runtime.

What it walks is forced on it, and it leaves that out of the result only where it forwarded at least one token at once
(`return_prefix` in its language_model.cc, 4.6 to 4.8). A prompt that has one token left beside longer ones therefore makes it hand out
the others' own ends as their answers, with the cap counted from there. So each prompt of a step keeps two tokens, or
each has one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fabric_pipelines import models
from fabric_pipelines.errors import EngineFailed, MissingDependency
from fabric_pipelines.models.ctranslate2_file import ModelFile, read_model_file
from fabric_pipelines.records.profile import Profile
from fabric_pipelines.worker.engines.agreement import Told, require_served
from fabric_pipelines.worker.engines.cuts import by_length, shared_prefix
from fabric_pipelines.worker.engines.door import Capabilities
from fabric_pipelines.worker.engines.opening import EngineFolder, require
from fabric_pipelines.worker.engines.sampling import is_greedy, sampling_objection, step_seed
from fabric_pipelines.worker.engines.stepping import SteppingEngine
from fabric_pipelines.worker.engines.tasks import Outcome, Task, failed

ARCHITECTURES = frozenset({"LlamaForCausalLM"})
KV_CACHE_TOKENS = 8192  # 46 KB a token in fp32 for SmolLM2-135M: 377 MB at most
SHARED_PREFIX_MIN = 8  # below that the extra pass costs what it saves
FORWARDED_MIN = 2  # tokens a prompt keeps beside its shared prefix: the runtime forwards one less than the shortest


class Ctranslate2Engine(SteppingEngine):
    """See the module. `threads` is the number of compute threads."""

    def __init__(self, name: str, folder: EngineFolder, threads: int) -> None:
        manifest = folder.manifest
        require_served(manifest, name, runtime="ctranslate2", architectures=ARCHITECTURES)
        super().__init__(
            name,
            manifest,
            folder.fingerprint,
            Capabilities(
                frozenset({"generate"}),
                continuous=False,
                packed=True,
                device="cpu",
                vocab_size=folder.facts["vocab_size"],
            ),
            Profile(
                max_batch_size=manifest.max_batch_size,
                max_num_tokens=manifest.max_num_tokens,
                kv_cache_tokens=KV_CACHE_TOKENS,
                window_tokens=manifest.max_num_tokens // 2,
            ),
        )
        self._folder, self._threads = folder, threads
        self._eos: int = folder.facts["eos_id"]
        self._generator: Any = None
        self._file: ModelFile | None = None
        self._vocabulary: list[str] = []

    def _load(self) -> None:
        self._runtime = _import()
        require(self.manifest, "version", f"ctranslate2 {self._runtime.__version__}", "the runtime")
        models.require_whole(self._folder.path)
        self._generator = self._open_generator()
        self._file = read_model_file(self._folder.path / "model.bin")
        self._vocabulary = _read_vocabulary(self._folder)

    def introspect(self) -> Mapping[str, Told]:
        assert self._file is not None, f"{self.name} is not open"
        precision = self._generator.compute_type.partition("_")[0]
        devices = len(self._generator.device_index) if self._generator.tensor_parallel else 1
        cache = f"a KV cache of {KV_CACHE_TOKENS} tokens"
        context = min(self._folder.facts["context"], KV_CACHE_TOKENS)
        return {
            "version": Told(f"ctranslate2 {self._runtime.__version__}", "the runtime"),
            "architecture": Told(self._file.architecture, "model.bin"),
            "weight_quantisation": Told(
                precision if precision.startswith("int") else "none", "the loaded model"
            ),
            "kv_quantisation": Told("none", "the runtime, whose cache holds floats,"),
            "world_size": Told(devices, "the loaded model"),
            "max_batch_size": Told(KV_CACHE_TOKENS // 2, cache, at_most=True),
            "max_num_tokens": Told(KV_CACHE_TOKENS, cache, at_most=True),
            "max_input_len": Told(context - 1, "context and cache of the model", at_most=True),
            "max_seq_len": Told(context, "context and cache of the model", at_most=True),
        }

    def _open_generator(self) -> Any:
        return self._runtime.Generator(
            str(self._folder.path),
            device="cpu",
            compute_type="int8",
            inter_threads=1,
            intra_threads=self._threads,
        )

    def _free(self) -> None:
        self._generator = self._file = None

    def _objection(self, task: Task) -> str | None:
        if task.max_new_tokens < 1:
            return "max_new_tokens is 0; a generation needs at least 1"
        if int(task.tokens.max()) >= len(self._vocabulary):
            return f"token id {int(task.tokens.max())} is beyond the vocabulary"
        top_k = task.sampling.get("top_k", 0)
        objection = sampling_objection(task.sampling)
        if objection is None and not is_greedy(task.sampling) and top_k > len(self._vocabulary):
            return (
                f"sampling field top_k is {top_k}, above the vocabulary of {len(self._vocabulary)}"
            )
        return objection

    def _cut(self, pending: Sequence[Task]) -> list[Task]:
        oldest = pending[0]
        if oldest.sampling.get("repetition_penalty", 1.0) != 1.0:
            # It penalises the tokens that it walks, not those that it forwards: only equal lengths are told apart by nothing.
            peers = [task for task in pending if task.length == oldest.length]
        else:
            short = oldest.length < FORWARDED_MIN
            peers = [task for task in pending if (task.length < FORWARDED_MIN) == short]
        return by_length(peers, self._fits)

    def _fits(self, longest: Task, count: int) -> bool:
        return (
            count <= self.profile.max_batch_size
            and count * longest.length <= self.profile.max_num_tokens
            and count * (longest.length + longest.max_new_tokens) <= self.profile.kv_cache_tokens
        )

    def _run(self, tasks: list[Task]) -> list[Outcome]:
        sampling = tasks[0].sampling
        if not is_greedy(sampling):
            self._reseed(step_seed(tasks))
        shared = shared_prefix(tasks, left=FORWARDED_MIN) if len(tasks) > 1 else 0
        shared = shared if shared >= SHARED_PREFIX_MIN else 0
        prompts = [[self._vocabulary[token] for token in task.tokens] for task in tasks]
        starts = [prompt[shared:] for prompt in prompts]
        least = min(map(len, starts))
        assert least >= FORWARDED_MIN or max(map(len, starts)) == 1, "this step would be echoed"
        options = {
            "static_prompt": prompts[0][:shared] or None,
            # The runtime's cache of prompt states has no bound: 33 MB stay for each prefix of 256 tokens.
            "cache_static_prompt": False,
            "include_prompt_in_result": False,
            "return_end_token": True,
        }
        results = self._generator.generate_batch(
            starts, max_length=tasks[0].max_new_tokens, **options, **_options(sampling)
        )
        answers: list[list[int]] = [result.sequences_ids[0] for result in results]
        walked = [task.tokens[shared + least :].tolist() for task in tasks]
        if any(_begins(ids, end) for ids, end in zip(answers, walked, strict=True)):
            self._require_no_echo(starts, options)
        reused = shared * (len(tasks) - 1)
        self.stats.reused_tokens += reused
        self.stats.computed_tokens += sum(task.length for task in tasks) - reused
        return [self._outcome(task, ids) for task, ids in zip(tasks, answers, strict=True)]

    def _require_no_echo(self, starts: list[list[str]], options: Mapping[str, Any]) -> None:
        """EngineFailed where the runtime hands out what it walks. An answer may well begin as its prompt ends, so it is not judged by
        its tokens: where each token of the vocabulary ends a sequence, an answer is one token long, and an echo longer."""
        results = self._generator.generate_batch(
            starts,
            max_length=max(map(len, starts)) + 1,
            end_token=list(range(len(self._vocabulary))),
            sampling_topk=1,
            **options,
        )
        if any(len(result.sequences_ids[0]) != 1 for result in results):
            raise EngineFailed(
                f"{self.name} returns the prompts' own tokens as generated ones in a step of lengths "
                f"{sorted(map(len, starts))}: ctranslate2 {self._runtime.__version__} has other rules than those "
                "its adapter knows; install the version in the engine's manifest"
            )

    def _reseed(self, seed: int) -> None:
        """The runtime draws from a generator per thread that takes its seed when the thread starts, so a new
        seed needs new threads: 0.24 s a step, against seconds of decoding."""
        self._generator = None
        self._runtime.set_random_seed(seed)
        self._generator = self._open_generator()

    def _outcome(self, task: Task, ids: list[int]) -> Outcome:
        if len(ids) > task.max_new_tokens:
            return failed(
                task,
                "EngineFailed",
                f"the runtime returned {len(ids)} tokens where at most {task.max_new_tokens} were asked for",
            )
        self.stats.generated_tokens += len(ids)
        if ids and ids[-1] == self._eos:
            reason, ids = "stop", ids[:-1]
        elif len(ids) == task.max_new_tokens:
            reason = "length"
        else:
            return failed(
                task,
                "EngineFailed",
                f"the runtime ended after {len(ids)} of {task.max_new_tokens} tokens without an end token",
            )
        return Outcome(task, "ok", reason, output=np.array(ids, np.uint32))


def _begins(ids: Sequence[int], end: Sequence[int]) -> bool:
    """Whether an answer begins as an echo of `end` would, which its cap may cut."""
    return bool(end) and list(ids[: len(end)]) == list(end[: len(ids)])


def _options(sampling: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {"repetition_penalty": sampling.get("repetition_penalty", 1.0)}
    if is_greedy(sampling):
        return {**options, "sampling_topk": 1}
    return {
        **options,
        "sampling_topk": sampling.get("top_k", 0),
        "sampling_topp": sampling.get("top_p", 1.0),
        "sampling_temperature": sampling["temperature"],
    }


def _read_vocabulary(folder: EngineFolder) -> list[str]:
    tokens: list[str] = json.loads((folder.path / "vocabulary.json").read_text())
    return tokens


def _import() -> Any:
    try:
        import ctranslate2
    except ImportError:
        raise MissingDependency("ctranslate2", "embedded", "generation on CPU") from None
    return ctranslate2

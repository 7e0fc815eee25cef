"""How far greedy answers of the embedded engine depend on the company of their prompt, and what the engine's own rounding makes of them.

    FABRIC_MODELS=... python -m tests.bench.greedy_company [--threads 1] [--new 16] [--rates]

*short* are English beginnings of 3 to 11 tokens, *one token* the same with a prompt of one token among them, *quickstart* 16 of its
48 chat prompts (32 new). Each is answered in the engine's own steps and alone, by the same library with int8 and with float32 sums. Counted
are answers that differ, once as texts and once at their first token; `gap` is what the better of the two tokens at the first difference
had over the other, in logits of the prompt alone in int8. `rounding` is the same prompt's logits in int8 from those in float32. --rates
answers *one token* three times and all 48 of *quickstart* in the engine's steps and nothing alone. One JSON object a set.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from fabric_pipelines import models, settings
from fabric_pipelines.telemetry import timed
from fabric_pipelines.worker.engines.registry import GENERATE, open_engine
from fabric_pipelines.workloads.synthetic import SyntheticRequest, rows
from tests.tiny_models import drain, lease_of

GREEDY = {"kind": "generate", "temperature": 0.0}
SHORT = [
    "The capital of France is", "The capital of France is the city of", "Once upon a time there was a small dog who",
    "Water boils at", "The three primary colours are red,", "My favourite food is", "In 1969 the first man walked on",
    "Python is a programming language that", "The sun rises in the", "A short poem about the sea:\n",
    "To be or not to be, that is the", "Large language models are trained on", "The quick brown fox jumps over the lazy",
]  # fmt: skip


class Alone:
    """The library by itself, one prompt at a time."""

    def __init__(self, engine: Any, compute_type: str, threads: int) -> None:
        import ctranslate2

        self._words, self._end = engine._vocabulary, engine._eos
        self.library = ctranslate2.Generator(
            str(engine._folder.path), compute_type=compute_type, intra_threads=threads
        )

    def answer(self, prompt: Sequence[int], new: int) -> list[int]:
        return self.together([prompt], new)[0]

    def together(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """In one batch, as the library does it: none of one token, whose neighbours it would answer with their own ends."""
        results = self.library.generate_batch(
            [[self._words[token] for token in prompt] for prompt in prompts],
            max_length=new, sampling_topk=1, include_prompt_in_result=False, return_end_token=True,
        )  # fmt: skip
        return [self._without_end(result.sequences_ids[0]) for result in results]

    def _without_end(self, ids: list[int]) -> list[int]:
        return ids[:-1] if ids[-1] == self._end else ids

    def logits(self, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        """[vocabulary], of what follows `tokens`."""
        return np.array(self.library.forward_batch([[self._words[token] for token in tokens]]))[
            0, -1
        ]


def rates(
    engine: Any, prompts: list[list[int]], new: int
) -> tuple[dict[str, Any], list[list[int]]]:
    """What the engine's steps took, and its answers."""
    steps, generated = engine.stats.steps, engine.stats.generated_tokens
    with timed() as took:
        engine.submit(lease_of(prompts, GREEDY, engine=engine.name, new=new))
        told = drain(engine, within_s=600)
    made = engine.stats.generated_tokens - generated
    figures = {
        "prompts": len(prompts), "lengths": [min(map(len, prompts)), max(map(len, prompts))],
        "steps": engine.stats.steps - steps, "generated": made,
        "tok/s": round(made / took["seconds"], 1), "tok/cpu-s": round(made / took["cpu_seconds"], 1),
    }  # fmt: skip
    return figures, [told[n]["output"] for n in range(len(prompts))]


def compared(
    engine: Any, int8: Alone, float32: Alone, prompts: list[list[int]], new: int
) -> dict[str, Any]:
    figures, together = rates(engine, prompts, new)
    alone = [int8.answer(prompt, new) for prompt in prompts]
    exact = [float32.answer(prompt, new) for prompt in prompts]
    longer = [prompt for prompt in prompts if len(prompt) > 1]
    mixed = float32.together(sorted(longer, key=len), new)
    single = [float32.answer(prompt, new) for prompt in sorted(longer, key=len)]
    rounding = [int8.logits(prompt) - float32.logits(prompt) for prompt in prompts]
    gaps = [
        round(_gap(int8, prompt, one, two), 2)
        for prompt, one, two in zip(prompts, alone, together, strict=True)
        if one != two
    ]
    return {
        **figures,
        "together from alone": _differ(together, alone), "gaps": sorted(gaps),
        "alone from float32": _differ(alone, exact), "together from float32": _differ(together, exact),
        "float32 together from alone": _differ(mixed, single),
        "rounding rms": round(float(np.sqrt(np.mean(np.square(rounding)))), 2),
        "rounding max": round(float(np.abs(rounding).max()), 2),
    }  # fmt: skip


def _differ(ones: list[list[int]], others: list[list[int]]) -> str:
    texts = sum(one != other for one, other in zip(ones, others, strict=True))
    firsts = sum(one[:1] != other[:1] for one, other in zip(ones, others, strict=True))
    return f"{texts} of {len(ones)}, {firsts} at the first token"


def _gap(library: Alone, prompt: list[int], one: list[int], other: list[int]) -> float:
    end = [library._end]
    same = next(n for n, (a, b) in enumerate(zip(one + end, other + end, strict=False)) if a != b)
    logits = library.logits([*prompt, *one[:same]])
    return abs(float(logits[(one + end)[same]] - logits[(other + end)[same]]))


def _told(name: str, figures: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"set": name, **figures}) + "\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Greedy answers alone and in company.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--new", type=int, default=16)
    parser.add_argument("--rates", action="store_true", help="what the steps take, nothing alone")
    given = parser.parse_args(argv)
    cache = settings.load().models
    engine = open_engine(GENERATE.name, cache=cache, threads=given.threads)
    tokeniser = models.tokeniser(GENERATE.model, cache)
    short = [list(map(int, ids)) for ids in tokeniser.encode([*SHORT, "Paris"])]
    texts = [row.text for row in rows(SyntheticRequest())]
    chats = [list(map(int, ids)) for ids in tokeniser.encode_chat(texts)]
    rates(engine, short[:1], 2)  # nobody pays for the first touch
    if given.rates:
        for name, prompts, new in [("one token", short, given.new)] * 3 + [
            ("quickstart", chats, 32)
        ]:
            _told(name, rates(engine, prompts, new)[0])
    else:
        int8, float32 = (Alone(engine, kind, given.threads) for kind in ("int8", "float32"))
        _told("short", compared(engine, int8, float32, short[:-1], given.new))
        _told("one token", compared(engine, int8, float32, short, given.new))
        _told("quickstart", compared(engine, int8, float32, chats[:16], 32))
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Any lengths may be waiting together: what the embedded engine hands back is generated, never a prompt's own end.

CTranslate2 hands out what it walks where the shortest prompt of a batch has one token left. So no test here compares with
the library in the same batch: the truth is each prompt by itself, which walks nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric_pipelines.errors import EngineFailed
from fabric_pipelines.worker.engines.ctranslate2 import Ctranslate2Engine
from fabric_pipelines.worker.engines.tasks import Task, tasks_of
from tests.tiny_models import TOKENS, drain, lease_of, polled_until_it_fails
from tests.unit.engines.float32_sums import float32_sums

GREEDY = {"kind": "generate", "temperature": 0.0}
PENALISED = {**GREEDY, "repetition_penalty": 1.5}
STEM = [20, 31, 42, 53, 64, 75, 86, 97, 108, 119, 130, 141, 152]
EOS = 2


@pytest.fixture
def exact(generate: Ctranslate2Engine) -> Ctranslate2Engine:
    float32_sums(generate)
    return generate


class Alone:
    """The library with one prompt at a time, each asked once."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._known: dict[tuple[object, ...], tuple[list[int], str, int]] = {}

    def answer(
        self, prompt: list[int], cap: int, penalty: float = 1.0
    ) -> tuple[list[int], str, int]:
        """Its output, why it ended, and how many tokens were generated."""
        asked = (*prompt, "cap", cap, penalty)
        if asked not in self._known:
            (result,) = self._library.generate_batch(
                [[TOKENS[token] for token in prompt]],
                max_length=cap, sampling_topk=1, repetition_penalty=penalty,
                include_prompt_in_result=False, return_end_token=True,
            )  # fmt: skip
            ids = result.sequences_ids[0]
            stopped = ids[-1] == EOS
            self._known[asked] = (
                ids[:-1] if stopped else ids,
                "stop" if stopped else "length",
                len(ids),
            )
        return self._known[asked]


@pytest.fixture
def alone(exact: Ctranslate2Engine) -> Alone:
    return Alone(exact._generator)


def told(engine: Ctranslate2Engine, prompts: list[list[int]], caps: list[int], **more: Any) -> Any:
    """(output, finish reason) of each prompt, and what the engine counted as generated."""
    before = engine.stats.generated_tokens
    engine.submit(lease_of(prompts, {**GREEDY, **more}, new=caps))
    rows = drain(engine)
    assert {row["status"] for row in rows.values()} == {"ok"}
    ended = [(rows[n]["output"], rows[n]["finish_reason"]) for n in range(len(prompts))]
    return ended, engine.stats.generated_tokens - before


def prompts_of(lengths: list[tuple[int, int, int]]) -> list[list[int]]:
    """(stem, tail, first) -> so many tokens of the stem, then so many others."""
    return [
        [*STEM[:stem], *((200 + first + 5 * n) % 260 + 3 for n in range(tail))] or [first + 3]
        for stem, tail, first in lengths
    ]


PROMPT = st.tuples(st.sampled_from([0, 0, 8, 9, 12, 13]), st.integers(0, 6), st.integers(0, 3))


@settings(max_examples=60, suppress_health_check=list(settings.default.suppress_health_check))
@given(
    data=st.lists(st.tuples(PROMPT, st.sampled_from([1, 4, 4, 4, 7])), min_size=2, max_size=9),
)
def any_mix(engine: Ctranslate2Engine, alone: Alone, data: list[Any]) -> None:
    prompts, caps = prompts_of([one for one, _ in data]), [cap for _, cap in data]
    ended, counted = told(engine, prompts, caps)
    expected = [alone.answer(prompt, cap) for prompt, cap in zip(prompts, caps, strict=True)]
    assert ended == [(output, reason) for output, reason, _ in expected]
    assert counted == sum(count for _, _, count in expected)


def test_any_mix_of_lengths_prefixes_and_caps_answers_as_each_prompt_alone(
    exact: Ctranslate2Engine, alone: Alone
) -> None:
    any_mix(exact, alone)
    assert exact.stats.reused_tokens > 0, "no mix shared a prefix"


@pytest.mark.parametrize(
    "prompts",
    [
        [[7], [9, 5, 30, 200, 17]],
        [[7], [9], [9, 5]],
        [[9, 5], [9, 5, 30, 30, 17, 6, 6, 6]],
        [[*STEM, 7], [*STEM, 9, 5, 30, 200]],
        [STEM, [*STEM, 9, 5, 30, 200]],
        [STEM, STEM],
        [[7], [7]],
        [STEM[:2], STEM[:1], STEM[:3], STEM],
    ],
    ids=["1+n", "1+1+2", "2+n", "tails 1+4", "beginning", "twice", "1 twice", "beginnings"],
)
@pytest.mark.parametrize("sampling", [GREEDY, PENALISED], ids=["plain", "penalised"])
def test_prompts_that_were_echoed_or_penalised_for_their_own_end(
    exact: Ctranslate2Engine, alone: Alone, prompts: list[list[int]], sampling: Mapping[str, Any]
) -> None:
    """A single prompt of one token had spoilt the answers of all beside it, with status ok. The penalty fell on the walked
    part of a prompt and on no other."""
    penalty = sampling.get("repetition_penalty", 1.0)
    ended, counted = told(exact, prompts, [6] * len(prompts), repetition_penalty=penalty)
    expected = [alone.answer(prompt, 6, penalty) for prompt in prompts]
    assert ended == [(output, reason) for output, reason, _ in expected]
    assert counted == sum(count for _, _, count in expected)


def test_an_end_token_first_is_a_stop_without_output_beside_any_length(
    exact: Ctranslate2Engine, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[7], [9, 5, 30, 200, 17], [9, 5], [*STEM, 7], [*STEM, 9, 5, 30]]
    ends = {prompt[0]: alone.answer(prompt, 1)[0][0] for prompt in prompts}
    real = exact._generator
    for end in set(ends.values()):
        library = Ending(real, end)
        monkeypatch.setattr(exact, "_generator", library)
        monkeypatch.setattr(exact, "_eos", end)
        ended, _ = told(exact, prompts, [5] * len(prompts))
        firsts = [alone.answer(prompt, 1)[0][0] for prompt in prompts]
        stopped = [first == end for first in firsts]
        assert [(output, reason) == ([], "stop") for output, reason in ended] == stopped


class Ending:
    """The runtime with another end token than its own."""

    def __init__(self, library: Any, end: int) -> None:
        self._library, self._end = library, end

    def generate_batch(self, prompts: list[list[str]], **options: Any) -> Any:
        return self._library.generate_batch(prompts, **{"end_token": [self._end], **options})


# ---- should the library's rule change


class Echoing:
    """The runtime as it would be if it also echoed prompts that keep two tokens: all but one are given as static."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def generate_batch(self, prompts: list[list[str]], **options: Any) -> Any:
        options["static_prompt"] = [*(options["static_prompt"] or []), prompts[0][0]]
        return self._library.generate_batch([prompt[1:] for prompt in prompts], **options)


def test_an_echo_that_the_adapter_does_not_expect_ends_the_engine_and_loses_no_task(
    exact: Ctranslate2Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact, "_generator", Echoing(exact._generator))
    exact.submit(lease_of([[7, 9], [7, 5, 30, 200, 17]], GREEDY, new=6))
    with pytest.raises(EngineFailed, match="the prompts' own tokens as generated ones"):
        polled_until_it_fails(exact, {})
    assert sorted(exact.unfinished()) == [0, 1]


def test_an_answer_that_does_begin_as_its_prompt_ends_is_handed_out(
    exact: Ctranslate2Engine, alone: Alone
) -> None:
    """A prompt is made whose last token the model says again."""
    start = [9, 5, 30, 200]
    repeats = next(
        prompt
        for token in range(3, len(TOKENS))
        if (prompt := [*start, token]) and alone.answer(prompt, 4)[0][:1] == [token]
    )
    ended, _ = told(exact, [start, repeats], [4, 4])
    assert ended[1] == alone.answer(repeats, 4)[:2]


def test_an_answer_longer_than_asked_for_is_a_failure_of_its_task(
    exact: Ctranslate2Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = exact._generator

    class Longer:
        def generate_batch(self, prompts: list[list[str]], **options: Any) -> Any:
            options["max_length"] += 2
            return real.generate_batch(prompts, **options)

    monkeypatch.setattr(exact, "_generator", Longer())
    exact.submit(lease_of([[9, 5, 30]], GREEDY, new=3))
    row = drain(exact)[0]
    assert (row["status"], row["output"]) == ("failed", None)
    assert "returned 5 tokens where at most 3 were asked for" in row["error_text"]


def test_a_step_is_filled_with_what_may_share_it(exact: Ctranslate2Engine) -> None:
    """Prompts of one token cost a step, not the steps of all others."""
    tasks: list[Task] = tasks_of(lease_of([[7], [9, 5], [8], [9, 5, 30], [*STEM]], GREEDY, new=4))
    assert [task.length for task in exact._cut(tasks)] == [1, 1]
    assert [task.length for task in exact._cut(tasks[1:])] == [2, 3, len(STEM)]

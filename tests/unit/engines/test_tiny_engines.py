"""The shipped engines through the door, on tiny models: results against the reference, refusals, budgets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fabric_pipelines.worker.engines.door import Engine
from fabric_pipelines.worker.engines.sampling import step_seed
from fabric_pipelines.worker.engines.tasks import tasks_of
from tests.reference_models import ReferenceBert, ReferenceLlama, relative_error
from tests.tiny_models import BERT_HEADS, TOKENS, drain, lease_of

GREEDY = {"kind": "generate", "temperature": 0.0}
EMBED = {"kind": "embed", "pooling": "mean", "normalise": True}
FP16_TOLERANCE = 1e-3  # half a unit of fp16 is 4.9e-4; the rest is float32
PROMPTS = [[5, 9, 200, 17, 30], [7], [261, 3, 3, 8, 120, 44, 90, 11], [6, 6]]


def _vectors(rows: dict[int, dict[str, Any]]) -> np.ndarray:
    assert {row["status"] for row in rows.values()} == {"ok"}
    return np.array([rows[task]["vector"] for task in sorted(rows)], np.float64)


# ---- generation


def test_a_batch_generates_up_to_its_cap_and_says_why_it_ended(generate: Engine) -> None:
    generate.submit(lease_of(PROMPTS, GREEDY, new=6))
    for row in drain(generate).values():
        assert row["status"] == "ok"
        if row["finish_reason"] == "length":
            assert len(row["output"]) == 6
        else:
            assert row["finish_reason"] == "stop"
            assert len(row["output"]) < 6
        assert all(token < len(TOKENS) for token in row["output"])


def test_tasks_of_one_lease_may_have_caps_of_their_own(generate: Engine) -> None:
    generate.submit(lease_of(PROMPTS, GREEDY, new=[1, 2, 3, 4]))
    rows = drain(generate)
    assert all(len(rows[task]["output"]) <= task + 1 for task in range(4))
    assert len(rows[0]["output"]) == 1 or rows[0]["finish_reason"] == "stop"


def test_a_shared_prefix_is_computed_once_and_changes_nothing(generate: Engine) -> None:
    prefix = list(range(10, 40))
    prompts = [[*prefix, 50, 60], [*prefix, 51, 61], [*prefix, 52, 62]]
    generate.submit(lease_of(prompts, GREEDY, new=5))
    together = drain(generate)
    assert generate.stats.reused_tokens == 2 * len(prefix)
    assert generate.stats.computed_tokens + generate.stats.reused_tokens == 3 * 32
    for task, prompt in enumerate(prompts):
        generate.submit(lease_of([prompt], GREEDY, new=5, first_id=100))
        assert drain(generate)[100]["output"] == together[task]["output"]


def test_the_end_token_stops_and_is_not_part_of_the_output(
    generate: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate.submit(lease_of(PROMPTS, GREEDY, new=8))
    task, first, at = next(
        (task, row["output"], place)
        for task, row in drain(generate).items()
        for place, token in enumerate(row["output"])
        if place > 0 and token not in row["output"][:place]
    )
    # The runtime is told that this token ends a sequence: the report must say stop, not length.
    real = generate._generator.generate_batch  # type: ignore[attr-defined]

    class Ending:
        def generate_batch(self, prompts: list[list[str]], **options: Any) -> Any:
            return real(prompts, end_token=[first[at]], **options)

    monkeypatch.setattr(generate, "_generator", Ending())
    monkeypatch.setattr(generate, "_eos", first[at])
    generate.submit(lease_of([PROMPTS[task]], GREEDY, new=8))
    row = drain(generate)[0]
    assert (row["finish_reason"], row["output"]) == ("stop", first[:at])


def test_an_end_that_the_runtime_does_not_explain_is_a_failure(
    generate: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = generate._generator.generate_batch  # type: ignore[attr-defined]

    class Short:
        def generate_batch(self, prompts: list[list[str]], **options: Any) -> Any:
            return real(prompts, **{**options, "max_length": 2})

    monkeypatch.setattr(generate, "_generator", Short())
    generate.submit(lease_of([[9, 9, 9]], GREEDY, new=8))
    row = drain(generate)[0]
    assert row["status"] == "failed"
    assert "ended after 2 of 8 tokens without an end token" in row["error_text"]


def test_sampling_is_reproduced_by_its_seed_whatever_ran_before(generate: Engine) -> None:
    def draw(seed: int) -> list[list[int]]:
        sampling = {"kind": "generate", "temperature": 2.0, "top_k": 0, "seed": seed}
        generate.submit(lease_of(PROMPTS, sampling, new=8))
        rows = drain(generate)
        return [rows[task]["output"] for task in sorted(rows)]

    first, other, again = draw(1), draw(2), draw(1)
    assert first == again
    assert first != other


def test_equal_prompts_in_other_rows_draw_other_numbers() -> None:
    sampling = {"kind": "generate", "temperature": 1.0, "seed": 3}
    one = tasks_of(lease_of([[1, 2]], sampling, new=8))
    two = tasks_of(lease_of([[1, 2]], sampling, new=8, first_id=1))
    assert step_seed(one) == step_seed(tasks_of(lease_of([[1, 2]], sampling, new=8)))
    assert step_seed(one) != step_seed(two)


@pytest.mark.parametrize(
    ("sampling", "new", "says"),
    [
        (GREEDY, 0, "needs at least 1"),
        ({"kind": "embed"}, 4, "kind 'embed' is not served"),
        ({**GREEDY, "top_q": 1}, 4, "fields top_q are unknown"),
        ({**GREEDY, "temperature": "hot"}, 4, "temperature is 'hot'"),
        ({**GREEDY, "top_k": -1}, 4, "top_k is -1"),
        ({**GREEDY, "seed": True}, 4, "seed is True"),
    ],
)
def test_a_sampling_beyond_the_engine_is_refused_per_task(
    generate: Engine, sampling: dict[str, Any], new: int, says: str
) -> None:
    generate.submit(lease_of([[5]], sampling, new=new))
    row = drain(generate)[0]
    assert row["status"] == "refused"
    assert says in row["error_text"]


def test_a_token_beyond_the_vocabulary_is_refused_not_looked_up(
    generate: Engine, hidden: Engine, embed: Engine
) -> None:
    last = {"kind": "hidden", "layers": [1], "pooling": "last"}
    for engine, sampling, new in ((generate, GREEDY, 2), (hidden, last, 0), (embed, EMBED, 0)):
        engine.submit(lease_of([[5, 9_999], [5]], sampling, new=new))
        rows = drain(engine)
        assert (rows[0]["status"], rows[1]["status"]) == ("refused", "ok")
        assert "9999 is beyond the vocabulary" in rows[0]["error_text"]


# ---- hidden states


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("layers", [[0, 2, 3], [3, 1], [2, 2], [0]])
def test_hidden_states_equal_the_reference_in_the_order_asked(
    hidden: Engine, tiny_folder: Path, layers: list[int], pooling: str
) -> None:
    hidden.submit(lease_of(PROMPTS, {"kind": "hidden", "layers": layers, "pooling": pooling}))
    found = _vectors(drain(hidden))
    reference = ReferenceLlama(tiny_folder / "tiny.gguf")
    for row, prompt in zip(found, PROMPTS, strict=True):
        states = reference.hidden(prompt)[layers]
        truth = states[:, -1] if pooling == "last" else states.mean(1)
        assert relative_error(row, truth.ravel()) < FP16_TOLERANCE


def test_a_packed_step_stays_within_the_budget_and_pads_nothing(
    hidden: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    real = hidden._infer  # type: ignore[attr-defined]
    monkeypatch.setattr(
        hidden, "_infer", lambda names, feed: sizes.append(feed["ids"].size) or real(names, feed)
    )
    lengths = [100, 120, 90, 250, 400, 30, 30]
    hidden.submit(
        lease_of([[5] * n for n in lengths], {"kind": "hidden", "layers": [1], "pooling": "mean"})
    )
    rows = drain(hidden)
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert sizes == [220, 90, 250, 400, 60]  # 400 alone is above the budget of 256, and goes alone
    assert hidden.stats.padded_tokens == 0


@pytest.mark.parametrize(
    ("sampling", "says"),
    [
        ({"kind": "hidden", "layers": [4], "pooling": "last"}, "layers [4] do not exist"),
        ({"kind": "hidden", "layers": [-1], "pooling": "last"}, "they go from 0 to 3"),
        ({"kind": "hidden", "layers": [], "pooling": "last"}, "must be a list of layer numbers"),
        ({"kind": "hidden", "layers": [1], "pooling": "max"}, "neither 'last' nor 'mean'"),
        ({"kind": "hidden", "layers": [1]}, "neither 'last' nor 'mean'"),
        ({"kind": "hidden", "layers": [1], "pooling": "last", "x": 1}, "fields x are unknown"),
        (EMBED, "kind 'embed' is not served here, only 'hidden'"),
    ],
)
def test_a_hidden_sampling_beyond_the_model_is_refused(
    hidden: Engine, sampling: dict[str, Any], says: str
) -> None:
    hidden.submit(lease_of([[5]], sampling))
    row = drain(hidden)[0]
    assert row["status"] == "refused"
    assert says in row["error_text"]


def test_a_generation_task_is_refused_by_a_single_pass_engine(hidden: Engine) -> None:
    hidden.submit(lease_of([[5]], {"kind": "hidden", "layers": [1], "pooling": "last"}, new=3))
    assert "a single pass generates nothing" in drain(hidden)[0]["error_text"]


def test_a_state_beyond_fp16_fails_its_task_and_no_other(
    hidden: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = hidden._infer  # type: ignore[attr-defined]

    def huge_in_the_second(names: list[str], feed: dict[str, Any]) -> list[np.ndarray]:
        states = [state.copy() for state in real(names, feed)]
        states[0][feed["seg"] == 1] = 1e6
        return states

    monkeypatch.setattr(hidden, "_infer", huge_in_the_second)
    hidden.submit(lease_of(PROMPTS, {"kind": "hidden", "layers": [1], "pooling": "last"}))
    rows = drain(hidden)
    assert [rows[task]["status"] for task in range(4)] == ["ok", "failed", "ok", "ok"]
    assert rows[1]["error_code"] == "VectorOverflow"


def test_a_fault_of_the_runtime_fails_the_step_not_the_worker(
    hidden: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = hidden._infer  # type: ignore[attr-defined]
    monkeypatch.setattr(
        hidden, "_infer", lambda names, feed: real(names, {**feed, "ids": feed["ids"] + 10_000})
    )
    hidden.submit(lease_of([[5, 6]], {"kind": "hidden", "layers": [1], "pooling": "last"}))
    row = drain(hidden)[0]
    assert (row["status"], row["error_code"]) == ("failed", "EngineFailed")


# ---- embeddings

TEXTS = [[2, 4, 5, 6, 3], [2, 7, 3], [2, 3], [2, *[4, 5, 8, 9] * 20, 3]]


def test_embeddings_equal_the_reference_and_have_length_one(
    embed: Engine, tiny_folder: Path
) -> None:
    embed.submit(lease_of(TEXTS, EMBED))
    found = _vectors(drain(embed))
    reference = ReferenceBert(tiny_folder / "model.safetensors", BERT_HEADS)
    for row, ids in zip(found, TEXTS, strict=True):
        assert relative_error(row, reference.embedding(ids)) < FP16_TOLERANCE
        assert abs(np.linalg.norm(row) - 1) < FP16_TOLERANCE


def test_without_normalising_the_mean_keeps_its_length(embed: Engine, tiny_folder: Path) -> None:
    embed.submit(lease_of(TEXTS[:1], {**EMBED, "normalise": False}))
    reference = ReferenceBert(tiny_folder / "model.safetensors", BERT_HEADS)
    assert relative_error(_vectors(drain(embed))[0], reference.hidden(TEXTS[0]).mean(0)) < 1e-3


def test_pads_are_counted_on_each_task(embed: Engine) -> None:
    embed.submit(lease_of(TEXTS[:3], EMBED))
    rows = drain(embed)
    assert [rows[task]["padded_tokens"] for task in range(3)] == [0, 2, 3]
    assert embed.stats.padded_tokens == 5
    assert embed.stats.computed_tokens == 10


def test_a_pooling_that_the_model_was_not_trained_with_is_refused(embed: Engine) -> None:
    embed.submit(lease_of([[2, 3]], {**EMBED, "pooling": "last"}))
    assert "it was trained with 'mean'" in drain(embed)[0]["error_text"]


def test_a_text_beyond_the_models_positions_is_refused_as_oversized(embed: Engine) -> None:
    embed.submit(lease_of([[4] * 513, [4] * 512], EMBED))
    rows = drain(embed)
    assert (rows[0]["status"], rows[0]["finish_reason"]) == ("refused", "oversized")
    assert rows[1]["status"] == "ok"


# ---- alone or in company


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_row_alone_equals_the_row_in_company(hidden: Engine, pooling: str) -> None:
    tasks = tasks_of(lease_of(PROMPTS, {"kind": "hidden", "layers": [3], "pooling": pooling}))
    together = hidden.vectors(tasks)  # type: ignore[attr-defined]
    for row, task in zip(together, tasks, strict=True):
        assert relative_error(row, hidden.vectors([task])[0]) < 1e-4  # type: ignore[attr-defined]


def test_a_text_alone_equals_the_text_in_company(embed: Engine) -> None:
    tasks = tasks_of(lease_of(TEXTS, EMBED))
    together = embed.vectors(tasks)  # type: ignore[attr-defined]
    for row, task in zip(together, tasks, strict=True):
        assert relative_error(row, embed.vectors([task])[0]) < 1e-4  # type: ignore[attr-defined]

"""Requests become the same tasks everywhere, and results say what came back for what was asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from fabric_pipelines.errors import UsageError
from fabric_pipelines.records.task import require_task_batch
from fabric_pipelines.testing.word_tokeniser import WordTokeniser
from fabric_pipelines.workloads import corpus, hidden_states, probes, synthetic
from fabric_pipelines.workloads.catalogue import WORKLOADS
from fabric_pipelines.workloads.embeddings import near_duplicates
from fabric_pipelines.workloads.overlap import overlapping_pairs
from fabric_pipelines.workloads.request import EngineChoice, Prepared

TOKENISER = WordTokeniser()


def prepared(name: str, partition: str | None = None, **values: object) -> Prepared:
    workload = WORKLOADS[name]
    engine = EngineChoice(workload.engine, "1" * 64, TOKENISER.vocab_size)
    return workload.prepare(values, engine, TOKENISER, partition or workload.partitions[0])


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_the_same_request_gives_the_same_id_and_valid_batches(name: str) -> None:
    first, second = prepared(name), prepared(name)
    assert first.submission == second.submission
    assert first.submission.tasks == first.tasks.num_rows > 0
    for batch in first.batches():
        require_task_batch(batch, vocab_size=TOKENISER.vocab_size)


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_a_salt_asks_for_the_work_again(name: str) -> None:
    again = prepared(name, salt="again").submission
    assert again.submission_id != prepared(name).submission.submission_id
    assert again.fingerprint == prepared(name).submission.fingerprint


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_the_launchpad_refuses_a_field_that_does_not_exist(name: str) -> None:
    with pytest.raises(UsageError, match="no_such_field"):
        prepared(name, no_such_field=1)


def test_a_prepared_submission_survives_an_arrow_file() -> None:
    given = prepared("probes")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, given.to_table().schema) as writer:
        writer.write_table(given.to_table())
    back = Prepared.from_table(pa.ipc.open_file(sink.getvalue()).read_all())
    assert back.submission == given.submission
    assert back.tasks.equals(given.tasks)


def test_another_reading_of_the_same_results_is_the_same_submission_in_every_field() -> None:
    """More shuffles of a control compute no state again, and a submission sent again must be the same."""
    few, many = prepared("probes", shuffles=20), prepared("probes", shuffles=50)
    assert few.submission == many.submission
    assert (few.request["shuffles"], many.request["shuffles"]) == (20, 50)


def test_partitions_of_hidden_states_are_disjoint_parts_of_the_corpus() -> None:
    rows = [
        row
        for book in corpus.BOOKS
        for row in prepared("hidden_states", book, verses_per_book=0)
        .tasks.column("source_row")
        .to_pylist()
    ]
    assert rows == list(range(len(corpus.verses())))
    assert prepared("hidden_states", "Ezra").submission.labels["partition"] == "Ezra"
    with pytest.raises(UsageError, match="no book 'Job'"):
        prepared("hidden_states", "Job")


def test_only_the_sampling_of_single_pass_work_pads() -> None:
    assert prepared("synthetic").padding_ratio == 0
    assert 0 < prepared("embeddings").padding_ratio < 0.5


def test_the_shipped_pairs_are_those_of_the_shipped_verses() -> None:
    found = overlapping_pairs([verse.text for verse in corpus.verses()])
    assert [(p.left, p.right, round(p.jaccard, 4)) for p in found] == [
        (p.left, p.right, p.jaccard) for p in corpus.known_pairs()
    ]
    assert sum(p.jaccard == 1 for p in found) >= 60


def test_the_corpus_is_small_enough_to_ship() -> None:
    assert len(corpus.verses()) == 800
    assert {verse.book for verse in corpus.verses()} == set(corpus.BOOKS)
    assert sum(len(verse.text) for verse in corpus.verses()) < 200_000


# Synthetic data


def landed_generations(request: synthetic.SyntheticRequest, replies: list[str]) -> pa.Table:
    count = len(replies)
    return pa.table(
        {
            "task_id": pa.array(range(count), pa.int64()),
            "source_row": pa.array(range(count), pa.int64()),
            "text": replies,
            "finish_reason": ["stop"] * count,
            "prompt_tokens": pa.array([5] * count, pa.int32()),
            "output_tokens": pa.array([3] * count, pa.int32()),
            "engine_fingerprint": ["f"] * count,
        }
    )


def test_true_answers_pass_their_verifiers_and_nonsense_fails() -> None:
    request = synthetic.SyntheticRequest(per_generator=2)
    rows = range(2 * len(request.generators))
    truth = [synthetic.answer_of(request, row) for row in rows]
    right = synthetic.results(asdict(request), landed_generations(request, truth))
    wrong = synthetic.results(asdict(request), landed_generations(request, ["banana"] * len(rows)))
    assert synthetic.pass_rates(right)["all"] == 1
    assert synthetic.pass_rates(wrong)["all"] == 0


def test_a_chatty_right_answer_passes_too() -> None:
    request = synthetic.SyntheticRequest(generators=("chain_sum",), per_generator=1)
    reply = f"Let us add them.\nThe final answer is **{synthetic.answer_of(request, 0)}**."
    assert synthetic.score(request, [0], [reply]) == [1.0]
    assert synthetic.score(request, [0], [""]) == [0.0]


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("No. 2058 is a leap year.", "No"),
        ("The LCM of 3 and 4 is 8. This is a special case.", "8"),
        ("To add them, start at six.\n\nThe sum is **16**.", "16"),
        ("4 - 2 = 2", "2"),
        ("Wednesday.", "Wednesday"),
        ("", ""),
    ],
)
def test_the_answer_is_read_out_of_a_reply(reply: str, answer: str) -> None:
    assert synthetic.answer_in(reply) == answer


def test_a_verifier_that_falls_over_prose_scores_nothing() -> None:
    request = synthetic.SyntheticRequest(generators=("prime_factorization",), per_generator=1)
    assert synthetic.score(request, [0], ["The prime factorization of 7 is easy"]) == [0.0]


def test_ids_do_not_depend_on_the_process() -> None:
    """ransom_note did: its puzzles followed the interpreter's hash seed, so each run submitted anew."""
    code = (
        "from tests.unit.workloads.test_workloads import prepared, WORKLOADS;"
        "print([prepared(name).submission.submission_id for name in sorted(WORKLOADS)])"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[3],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1


def test_another_seed_gives_other_prompts() -> None:
    first = {row.text for row in synthetic.rows(synthetic.SyntheticRequest(seed=1))}
    held_out = {row.text for row in synthetic.rows(synthetic.SyntheticRequest(seed=2))}
    assert (
        len(first & held_out) < len(first) / 2
    )  # easy puzzles are few; without care it was 40 of 48


def test_an_unknown_generator_is_named() -> None:
    with pytest.raises(UsageError, match="no generator 'nothing'"):
        synthetic.rows(synthetic.SyntheticRequest(generators=("nothing",)))


# Probe statements


def test_statements_are_balanced_and_differ_in_one_fact() -> None:
    made = probes.statements(probes.ProbesRequest())
    assert len(made) <= 160
    for held_out in (False, True):
        half = [item for item in made if item.held_out is held_out]
        assert sum(item.label for item in half) * 2 == len(half)
        true_words = sorted(probes.words_of(" ".join(i.text for i in half if i.label)))
        false_words = sorted(probes.words_of(" ".join(i.text for i in half if not i.label)))
        assert true_words == false_words


def test_no_false_statement_is_true() -> None:
    made = probes.statements(probes.ProbesRequest())
    true = {item.text for item in made if item.label}
    assert true.isdisjoint(item.text for item in made if not item.label)


def test_no_entity_stands_in_both_halves() -> None:
    made = probes.statements(probes.ProbesRequest())
    held_out = {item.entity for item in made if item.held_out}
    assert held_out
    assert held_out.isdisjoint(item.entity for item in made if not item.held_out)


def landed_states(count: int, states: np.ndarray) -> pa.Table:
    return pa.table(
        {
            "task_id": pa.array(range(count), pa.int64()),
            "source_row": pa.array(range(count), pa.int64()),
            "prompt_tokens": pa.array([5] * count, pa.int32()),
            "vector": pa.array(list(states.astype(np.float16)), pa.list_(pa.float16())),
            "engine_fingerprint": ["f"] * count,
        }
    )


def test_a_planted_truth_is_found_in_its_layer_only() -> None:
    request = probes.ProbesRequest(layers=(1, 2), shuffles=10)
    made = probes.statements(request)
    generator = np.random.default_rng(0)
    states = generator.normal(size=(len(made), 2, 64))
    states[:, 1, 5] += np.where([item.label for item in made], 6.0, -6.0)
    table = probes.results(asdict(request), landed_states(len(made), states.reshape(len(made), -1)))
    (noise, planted), floor = probes.fit_layers(asdict(request), table)
    assert planted.fit.accuracy > 0.9
    assert planted.fit.low > planted.fit.control
    assert noise.fit.accuracy < 0.7
    assert floor.accuracy <= 0.6
    assert probes.report([noise, planted], floor).num_rows == 2


def test_hidden_states_come_apart_by_layer() -> None:
    request = hidden_states.HiddenStatesRequest(layers=(3, 9))
    states = np.arange(2 * 8, dtype=np.float32).reshape(2, 8)
    states[1, 7] = np.inf
    table = hidden_states.results(asdict(request), landed_states(2, states))
    assert table.column("layer_3").to_pylist() == [[0, 1, 2, 3], [8, 9, 10, 11]]
    summary = {row["layer"]: row for row in hidden_states.layer_summary(table).to_pylist()}
    assert summary[3]["magnitude_max"] == 11
    assert (summary[3]["non_finite"], summary[9]["non_finite"]) == (0, 1)


def test_a_near_duplicate_is_found_when_one_end_ranks_the_other() -> None:
    pair = corpus.known_pairs()[0]
    rows = np.array([pair.left, pair.right, 799], np.int64)
    vectors = np.eye(3, 4, dtype=np.float32)
    vectors[1] = vectors[0]
    found = near_duplicates(rows, vectors, np.array([[pair.right], [799], [pair.left]]))
    lost = near_duplicates(rows, vectors, np.array([[799], [799], [pair.left]]))
    assert (found.known, found.found, lost.found) == (1, 1, 0)
    assert found.table.to_pylist()[0]["cosine"] == 1
    assert found.similarities[0] == 1


def test_metadata_of_a_task_names_its_origin() -> None:
    first = json.loads(prepared("embeddings").tasks.column("metadata")[0].as_py())
    assert first == {"book": "2 Kings", "reference": "2 Kings 1:1"}

"""What every engine promises the loop, whatever it runs on; each engine's test module subclasses `Conformance`.

A subject brings an open engine, prompts it can serve, what its library answers when it is used directly, and a way to
break it in mid-batch. Nothing here knows an engine beyond the door.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from fabric_pipelines.errors import EngineFailed
from fabric_pipelines.worker.engines.door import Engine
from fabric_pipelines.worker.results import Results
from fabric_pipelines.worker.supply import Supply
from tests.tiny_models import drain, lease_of, polled_until_it_fails

WITHIN_S = 120.0
TRIES = 10
MANY = 150  # several steps of any engine: some need three failed ones to give up


@dataclass
class Subject:
    """direct: prompts -> each one's tokens or vector from the library itself; new: output cap (0: single pass);
    tolerance: of a vector, 0 = tokens must be equal; breaks: makes the runtime fail from now on; oversized: a
    prompt beyond its limit; bad_token: an id beyond its vocabulary."""

    engine: Engine
    sampling: dict[str, Any]
    prompts: list[list[int]]
    new: int
    direct: Callable[[Sequence[list[int]]], list[Any]]
    breaks: Callable[[], None]
    oversized: list[int]
    bad_token: int
    tolerance: float = 0.0

    def lease(self, prompts: list[list[int]], first_id: int = 0, **more: Any) -> Any:
        sampling = {**self.sampling, **more}
        return lease_of(prompts, sampling, engine=self.engine.name, new=self.new, first_id=first_id)

    def answer(self, row: dict[str, Any]) -> Any:
        return row["vector"] if row["output"] is None else row["output"]


class Conformance:
    """Subclasses give the fixture `subject`."""

    def test_what_it_hands_back_is_what_the_worker_takes_for_what_it_gave(
        self, subject: Subject
    ) -> None:
        """worker.results compares: nothing of a sound engine may be called wrong, refusals among it."""
        supply = Supply()
        results = Results(subject.engine, supply)
        prompts = [*subject.prompts, [subject.bad_token] * 3, subject.oversized]
        lease = subject.lease(prompts, first_id=1000)
        supply.take(lease)
        subject.engine.submit(lease)
        supply.fed()
        statuses: list[str] = []
        until_s = time.monotonic() + WITHIN_S
        while len(supply) and time.monotonic() < until_s:
            for batch in subject.engine.poll(1.0):
                statuses += results.taken(batch).column("status").to_pylist()
        assert sorted(statuses) == ["ok"] * len(subject.prompts) + ["refused"] * 2
        assert results.wrong == 0
        assert not len(supply)

    def test_every_task_comes_back_once_under_its_own_id(self, subject: Subject) -> None:
        many = subject.prompts * 3
        half = len(many) // 2
        subject.engine.submit(subject.lease(many[:half], first_id=1000))
        subject.engine.submit(subject.lease(many[half:], first_id=1000 + half))
        rows = drain(subject.engine, within_s=WITHIN_S)
        assert sorted(rows) == list(range(1000, 1000 + len(many)))
        for place, prompt in enumerate(many):
            row = rows[1000 + place]
            assert row["status"] == "ok"
            assert row["source_row"] == 2000 + place
            assert row["metadata"] == b"m%d" % (1000 + place)
            assert row["prompt_tokens"] == len(prompt)
            assert row["engine_fingerprint"] == subject.engine.fingerprint
            assert 0 < row["t_start_us"] <= row["t_end_us"]

    def test_answers_are_those_of_the_library_used_directly(self, subject: Subject) -> None:
        expected = subject.direct(subject.prompts)
        subject.engine.submit(subject.lease(subject.prompts, first_id=50))
        rows = drain(subject.engine, within_s=WITHIN_S)
        for place, told in enumerate(expected):
            answer = subject.answer(rows[50 + place])
            if subject.tolerance:
                np.testing.assert_allclose(answer, told, rtol=0, atol=subject.tolerance)
            else:
                assert answer == list(told)

    def test_an_answer_is_that_of_its_prompt_alone_whatever_lengths_are_beside_it(
        self, subject: Subject
    ) -> None:
        """The library with one prompt at a time is no measure of this: some hand out a longer neighbour's own end."""
        mixes = mixed_lengths(subject)
        alone: list[dict[str, Any]] = []
        for place, prompt in enumerate(mixes):
            subject.engine.submit(subject.lease([prompt], first_id=1000 + place))
            alone.append(drain(subject.engine, within_s=WITHIN_S)[1000 + place])
        subject.engine.submit(subject.lease(mixes, first_id=2000))
        rows = drain(subject.engine, within_s=WITHIN_S)
        for place, told in enumerate(alone):
            row = rows[2000 + place]
            ends = ("status", "finish_reason", "prompt_tokens")
            assert [row[name] for name in ends] == [told[name] for name in ends]
            if subject.tolerance:
                np.testing.assert_allclose(
                    subject.answer(row), subject.answer(told), rtol=0, atol=subject.tolerance
                )
            else:
                assert subject.answer(row) == subject.answer(told)

    def test_what_cannot_be_served_is_refused_one_by_one(self, subject: Subject) -> None:
        good = subject.prompts[0]
        bad = [good, subject.oversized, [*good, subject.bad_token], good]
        subject.engine.submit(subject.lease(bad))
        subject.engine.submit(subject.lease([good], first_id=4, colour="red"))
        rows = drain(subject.engine, within_s=WITHIN_S)
        told = [(rows[n]["status"], rows[n]["finish_reason"]) for n in range(5)]
        assert [status for status, _ in told] == ["ok", "refused", "refused", "ok", "refused"]
        assert told[1][1] == "oversized"
        assert "max_input_len" in rows[1]["error_text"] or "max_seq_len" in rows[1]["error_text"]
        assert str(subject.bad_token) in rows[2]["error_text"]
        assert "colour" in rows[4]["error_text"]
        assert subject.answer(rows[0]) == subject.answer(rows[3])

    def test_a_drain_leaves_nothing_behind(self, subject: Subject) -> None:
        engine = subject.engine
        before = engine.stats.offered_tokens
        engine.submit(subject.lease(subject.prompts))
        drain(engine, within_s=WITHIN_S)
        assert engine.unfinished() == []
        assert engine.poll(0.0) == []
        stats = engine.stats
        assert stats.offered_tokens - before == sum(len(prompt) for prompt in subject.prompts)
        assert stats.busy_s > 0

    def test_what_did_not_start_can_be_taken_back_and_given_again(self, subject: Subject) -> None:
        many = subject.prompts * 20
        for _ in range(
            TRIES
        ):  # a quick engine on a busy machine may have begun all of it before we ask
            subject.engine.submit(subject.lease(many[:40]))
            subject.engine.submit(subject.lease(many[40:], first_id=40))
            withdrawn = subject.engine.withdraw_unstarted()
            rows = drain(subject.engine, within_s=WITHIN_S)
            assert sorted([*withdrawn, *rows]) == list(range(len(many)))
            if withdrawn:
                break
        assert withdrawn, f"in {TRIES} tries nothing could be taken back"
        again = [many[task] for task in withdrawn[:4]]
        subject.engine.submit(subject.lease(again, first_id=withdrawn[0]))
        assert len(drain(subject.engine, within_s=WITHIN_S)) == len(again)

    def test_death_in_mid_batch_is_said_and_loses_no_task(self, subject: Subject) -> None:
        """The second lease is given after the break: a quick engine may have ended all of the first by then."""
        many = subject.prompts * MANY
        engine = subject.engine
        engine.submit(subject.lease(many[:300]))
        returned: dict[int, Any] = {}

        def work() -> None:
            for batch in engine.poll(0.0):
                returned.update((row["task_id"], row) for row in batch.to_pylist())
            subject.breaks()
            engine.submit(subject.lease(many[300:], first_id=300))
            polled_until_it_fails(engine, returned, within_s=WITHIN_S)

        with pytest.raises(EngineFailed):
            work()
        assert len(returned) < len(many)
        assert sorted([*returned, *engine.unfinished()]) == list(range(len(many)))


def mixed_lengths(subject: Subject) -> list[list[int]]:
    """Prompts of 1 to 9 tokens, the same behind a prefix of 12, beginnings of each other, and one twice."""
    words = [token for prompt in subject.prompts for token in prompt]
    drawn = np.random.default_rng(7)
    apart = [drawn.choice(words, length).tolist() for length in (1, 5, 2, 9, 1, 3)]
    prefix = drawn.choice(words, 12).tolist()
    shared = [[*prefix, *tail] for tail in apart]
    return [*apart, *shared, apart[3][:4], prefix, prefix, shared[3][:-1]]

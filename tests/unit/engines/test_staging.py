"""Steps of a torch engine pass through memory that was taken once; what computes is marked as the engine's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fabric_pipelines.device import calls
from fabric_pipelines.errors import EngineFailed, UsageError
from fabric_pipelines.testing.host_card import HostCard
from fabric_pipelines.worker.engines import staging
from fabric_pipelines.worker.engines.staging import Staging
from fabric_pipelines.worker.engines.tasks import tasks_of
from fabric_pipelines.worker.engines.transfers import CupyStream
from tests.tiny_models import lease_of
from tests.unit.engines.test_conformance import GREEDY, PROMPTS
from tests.unit.engines.transformers_tiny import (
    GENERATE,
    HIDDEN,
    TinyCheckpoints,
    libraries,
    opened,
    write_checkpoints,
)

pytestmark = pytest.mark.filterwarnings("default")
MEAN = {"kind": "hidden", "layers": [1, 2], "pooling": "mean"}


@pytest.fixture(scope="module")
def torch() -> Any:
    return libraries()[0]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoints:
    return write_checkpoints(tmp_path_factory.mktemp("staging"))


class LateEvent:
    """Comes when it was asked three times; ticks of a clock stand for time on the card."""

    clock = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.asked, self.at = 0, 0.0

    def record(self, stream: object) -> None:
        LateEvent.clock += 0.25
        self.asked, self.at = 0, LateEvent.clock

    def query(self) -> bool:
        self.asked += 1
        return self.asked >= 3

    def elapsed_time(self, later: LateEvent) -> float:
        return 1e3 * (later.at - self.at)


def card_like(torch: Any) -> Any:
    """torch with pinned memory that is not, streams without a card and events that come late."""

    @contextmanager
    def stream(one: object) -> Iterator[None]:
        yield

    cuda = SimpleNamespace(Event=LateEvent, Stream=object, stream=stream)

    def empty(size: int, *, dtype: Any, pin_memory: bool = False, device: str = "cpu") -> Any:
        return torch.empty(size, dtype=dtype)

    names = ("uint8", "int32", "int64", "float32")
    return SimpleNamespace(cuda=cuda, empty=empty, **{name: getattr(torch, name) for name in names})


def test_inputs_arrive_whole_in_memory_that_stays_the_same(torch: Any) -> None:
    stage = Staging(torch, "cpu", 256, 64)
    places = set()
    for size in (5, 1, 9):
        ids = np.arange(size, dtype=np.int64)[None]
        ends = np.array([0, size], np.int32)
        there, ends_there = stage.put([ids, ends])
        np.testing.assert_array_equal(there.numpy(), ids)
        np.testing.assert_array_equal(ends_there.numpy(), ends)
        places.add(there.data_ptr())
    assert len(places) == 1
    with pytest.raises(AssertionError, match="a step of 272 bytes was not foreseen"):
        stage.put([np.zeros(33, np.int64)])


@pytest.mark.parametrize("rows", [1, 3, 4, 11])
def test_results_larger_than_their_memory_come_in_pieces(torch: Any, rows: int) -> None:
    stage = Staging(torch, "cpu", 16, 4 * 5 * 4)
    made = torch.arange(rows * 5, dtype=torch.float32).view(rows, 5)
    stage.put([np.zeros(1, np.int64)])
    found = stage.fetch(made)
    made.zero_()
    np.testing.assert_array_equal(found, np.arange(rows * 5, dtype=np.float32).reshape(rows, 5))
    with pytest.raises(AssertionError, match="a row of 400 bytes was not foreseen"):
        stage.fetch(torch.zeros(1, 100))


def test_the_end_of_a_step_is_asked_for_and_its_time_is_the_cards(
    torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []
    monkeypatch.setattr(staging.time, "sleep", looks.append)
    stage = Staging(card_like(torch), "cuda", 64, 64)
    for _ in range(3):
        stage.put([np.zeros(2, np.int64)])
        with stage.stream():
            made = torch.ones(2, 2)
        stage.fetch(made)
    assert looks == [staging.POLL_S] * 6
    assert stage.device_s == pytest.approx(3 * 0.25)
    assert (stage.gaps.count, stage.gaps.seconds) == (2, pytest.approx(2 * 0.25))
    stage.forget()
    assert (stage.device_s, stage.gaps.count) == (0.0, 0)
    stage.put([np.zeros(2, np.int64)])
    stage.fetch(torch.ones(2, 2))
    assert stage.device_s == pytest.approx(0.25)
    assert stage.gaps.count == 0, "what lies before the first step that counts is no gap"


def test_a_compute_stream_cannot_be_waited_for(torch: Any) -> None:
    cupy = SimpleNamespace(
        cuda=SimpleNamespace(runtime=None, Stream=lambda non_blocking: SimpleNamespace(ptr=1))
    )
    for stream in (Staging(torch, "cpu", 16, 16), CupyStream(cupy), HostCard().stream()):
        with pytest.raises(UsageError, match="a compute stream is not waited for"):
            stream.synchronize()


def test_an_engine_takes_its_memory_when_it_opens_and_none_in_a_step(
    tiny: TinyCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    real = Staging._pinned

    def pinned(self: Staging, size: int) -> Any:
        made.append(size)
        return real(self, size)

    monkeypatch.setattr(Staging, "_pinned", pinned)
    with opened(HIDDEN, tiny.cache) as engine:
        assert len(made) == 2, "inputs and results"
        place = engine._staging._there.data_ptr()
        for count in (1, len(PROMPTS)):
            engine.vectors(tasks_of(lease_of(PROMPTS[:count], MEAN)))
        assert (len(made), engine._staging._there.data_ptr()) == (2, place)


def test_the_largest_step_of_the_profile_fits(tiny: TinyCheckpoints) -> None:
    """LIMITS: 256 tokens or one prompt of 500, 8 sequences, and every layer of it."""
    every = {**MEAN, "layers": [0, 1, 2, 3]}
    with opened(HIDDEN, tiny.cache) as engine:
        for lengths in ([500], [32] * 8):
            prompts = [[5] * length for length in lengths]
            vectors = engine.vectors(tasks_of(lease_of(prompts, every)))
            assert vectors.shape == (len(lengths), 4 * 64)


def test_a_warm_up_is_the_largest_step_and_leaves_no_counters(tiny: TinyCheckpoints) -> None:
    seen: list[int] = []
    with opened(HIDDEN, tiny.cache) as engine:
        hook = engine._embedding.register_forward_hook(
            lambda _, given, made: seen.append(made.shape[1])
        )
        engine._warm_up()
        hook.remove()
        assert seen == [256, 1]
        assert engine.stats.computed_tokens == engine.stats.tasks == 0


def test_without_room_for_its_largest_step_an_engine_does_not_open(
    tiny: TinyCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(self: Staging, size: int) -> Any:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(Staging, "_pinned", no_room)
    with (
        pytest.raises(EngineFailed, match=r"largest size .*out of memory.*--max-num-tokens"),
        opened(HIDDEN, tiny.cache),
    ):
        pass


def test_the_model_runs_as_the_engine_and_pooling_and_attention_as_ours(
    tiny: TinyCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner: list[str] = ["ours"]
    seen: set[tuple[str, str]] = set()

    def marked(name: str) -> Any:
        @contextmanager
        def mark() -> Iterator[None]:
            owner.append(name)
            yield
            owner.pop()

        return mark

    monkeypatch.setattr(calls, "engine", marked("engine"))
    monkeypatch.setattr(calls, "ours", marked("ours"))
    with opened(HIDDEN, tiny.cache) as engine:
        pool, put, fetch = engine._pool, engine._staging.put, engine._staging.fetch

        def noted(name: str, real: Any) -> Any:
            def call(*given: Any) -> Any:
                seen.add((name, owner[-1]))
                return real(*given)

            return call

        engine._pool = noted("pool", pool)
        engine._staging.put, engine._staging.fetch = noted("put", put), noted("fetch", fetch)
        engine._embedding.register_forward_hook(lambda *_: seen.add(("model", owner[-1])))
        engine.vectors(tasks_of(lease_of(PROMPTS, MEAN)))
    assert seen == {("pool", "ours"), ("put", "ours"), ("fetch", "ours"), ("model", "engine")}
    assert owner == ["ours"]


def test_a_generation_runs_as_the_engine(
    tiny: TinyCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    @contextmanager
    def engine_mark() -> Iterator[None]:
        seen.append("in")
        yield
        seen.append("out")

    monkeypatch.setattr(calls, "engine", engine_mark)
    with opened(GENERATE, tiny.cache) as engine:
        fetch = engine._staging.fetch
        engine._staging.fetch = lambda made: (seen.append("fetch"), fetch(made))[1]
        engine._run(tasks_of(lease_of(PROMPTS[:2], GREEDY, new=[3, 3])))
    assert seen == ["in", "out", "fetch"]

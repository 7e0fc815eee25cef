"""Steps of a torch engine pass through memory that was taken once; what computes is marked as the engine's."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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
from tests.tiny_models import drain, lease_of
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

    names = ("uint8", "int32", "int64", "float32", "inference_mode")
    return SimpleNamespace(cuda=cuda, empty=empty, **{name: getattr(torch, name) for name in names})


def test_inputs_arrive_whole_in_memory_that_stays_the_same(torch: Any) -> None:
    stage = Staging(torch, "cpu", [128, 8], 64)
    places = set()
    for size in (5, 1, 9):
        ids = np.arange(size, dtype=np.int64)[None]
        ends = np.array([0, size], np.int32)
        slot, (there, ends_there) = stage.put([ids, ends])
        np.testing.assert_array_equal(there.numpy(), ids)
        np.testing.assert_array_equal(ends_there.numpy(), ends)
        places.add((there.data_ptr(), ends_there.data_ptr()))
        offsets = [tensor.storage_offset() for tensor in (there, ends_there)]
        assert offsets == [0, 0], "else compiled code would be compiled again"
        stage.withdraw(slot)
    assert len(places) == 1
    with pytest.raises(AssertionError, match="an input of 136 bytes was not foreseen"):
        stage.put([np.zeros(17, np.int64), ends])


@pytest.mark.parametrize("rows", [1, 3, 4, 11])
def test_results_larger_than_their_memory_come_in_pieces(torch: Any, rows: int) -> None:
    stage = Staging(torch, "cpu", [16], 4 * 5 * 4)
    made = torch.arange(rows * 5, dtype=torch.float32).view(rows, 5)
    slot, _ = stage.put([np.zeros(1, np.int64)])
    stage.launched(slot, made)
    found = stage.fetch(slot, made)
    made.zero_()
    np.testing.assert_array_equal(found, np.arange(rows * 5, dtype=np.float32).reshape(rows, 5))
    with pytest.raises(AssertionError, match="a row of 400 bytes was not foreseen"):
        stage.launched(slot, torch.zeros(1, 100))


def test_the_end_of_a_step_is_asked_for_and_its_time_is_the_cards(
    torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []
    monkeypatch.setattr(staging.time, "sleep", looks.append)
    stage = Staging(card_like(torch), "cuda", [64], 64)

    def step() -> None:
        slot, _ = stage.put([np.zeros(2, np.int64)])
        with stage.stream():
            made = torch.ones(2, 2)
        stage.launched(slot, made)
        stage.fetch(slot, made)

    for _ in range(3):
        step()
    assert looks == [staging.POLL_S] * 6
    assert stage.device_s == pytest.approx(3 * 0.25)
    assert (stage.gaps.count, stage.gaps.seconds) == (2, pytest.approx(2 * 0.25))
    stage.forget()
    assert (stage.device_s, stage.gaps.count) == (0.0, 0)
    step()
    assert stage.device_s == pytest.approx(0.25)
    assert stage.gaps.count == 0, "what lies before the first step that counts is no gap"
    step()
    assert stage.gaps.count == 1


def test_a_step_may_be_put_while_the_one_before_is_not_fetched_and_keeps_its_own(
    torch: Any,
) -> None:
    stage = Staging(card_like(torch), "cuda", [64], 64)
    first, (ids,) = stage.put([np.array([[1, 2]], np.int64)])
    one = ids.float() * 10
    stage.launched(first, one)
    second, (ids,) = stage.put([np.array([[3, 4]], np.int64)])
    other = ids.float() * 10
    stage.launched(second, other)
    with pytest.raises(AssertionError, match="2 steps are under way"):
        stage.put([np.zeros(1, np.int64)])
    np.testing.assert_array_equal(stage.fetch(first, one), [[10, 20]])
    np.testing.assert_array_equal(stage.fetch(second, other), [[30, 40]])
    stage.put([np.zeros(1, np.int64)])


def test_a_step_that_fails_on_the_card_leaves_its_slot(
    torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Staging(card_like(torch), "cuda", [64], 64)

    def lost(self: LateEvent) -> bool:
        raise RuntimeError("unspecified launch failure")

    for _ in range(3):
        slot, _ = stage.put([np.zeros(2, np.int64)])
        stage.launched(slot, torch.ones(1, 1))
        with monkeypatch.context() as patch:
            patch.setattr(LateEvent, "query", lost)
            with pytest.raises(RuntimeError, match="launch failure"):
                stage.fetch(slot, torch.ones(1, 1))


def test_a_compute_stream_cannot_be_waited_for(torch: Any) -> None:
    cupy = SimpleNamespace(
        cuda=SimpleNamespace(runtime=None, Stream=lambda non_blocking: SimpleNamespace(ptr=1))
    )
    for stream in (Staging(torch, "cpu", [16], 16), CupyStream(cupy), HostCard().stream()):
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
        assert len(made) == 8, "three inputs and the results, of two slots"
        place = engine._staging._there[0].data_ptr()
        for count in (1, len(PROMPTS)):
            engine.vectors(tasks_of(lease_of(PROMPTS[:count], MEAN)))
        assert (len(made), engine._staging._there[0].data_ptr()) == (8, place)


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
        engine._staging.fetch = lambda *step: (seen.append("fetch"), fetch(*step))[1]
        engine._run(tasks_of(lease_of(PROMPTS[:2], GREEDY, new=[3, 3])))
    assert seen == ["in", "out", "fetch"]


def test_a_step_is_launched_before_the_results_of_the_one_before_are_there(
    tiny: TinyCheckpoints,
) -> None:
    """And never a third: two are under way at most, whatever waits."""
    order: list[str] = []
    second_is_launched, go_on = threading.Event(), threading.Event()
    with opened(HIDDEN, tiny.cache) as engine:
        engine._launch_ahead()
        launch, fetch = engine._launch, engine._staging.fetch

        def noted_launch(*step: Any) -> Any:
            made = launch(*step)
            order.append("launch")
            if order.count("launch") == 2:
                second_is_launched.set()
            return made

        def late_fetch(*step: Any) -> Any:
            assert second_is_launched.wait(60)
            assert go_on.wait(60)
            order.append("fetch")
            return fetch(*step)

        engine._launch, engine._staging.fetch = noted_launch, late_fetch
        prompts = [[5, 9, 7]] * 8 * 4  # LIMITS: eight a step
        engine.submit(lease_of(prompts, MEAN))
        assert engine.poll(0.0) == []
        assert second_is_launched.wait(60)
        assert order == ["launch", "launch"]
        assert len(engine.unfinished()) == 32
        assert len(engine.withdraw_unstarted()) == 16, "two steps were begun"
        go_on.set()
        rows = drain(engine)
        assert {row["status"] for row in rows.values()} == {"ok"}
        assert order == ["launch", "launch", "fetch", "fetch"]
        assert engine.stats.steps == 2
        assert engine.stats.computed_tokens == 16 * 3
        assert engine.stats.busy_s > 0
    assert engine._fetcher is None


def test_after_the_warm_up_no_block_is_compiled_again_whatever_the_size_of_a_step(
    torch: Any, tiny: TinyCheckpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inputs of one step lay behind each other in one block of memory: an odd number of tokens moved the second, and all blocks
    were compiled once more in the first seconds of a run, which cost four of them."""
    from torch._dynamo.utils import counters

    compile_as_it_is = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", lambda work, **how: compile_as_it_is(work, **how))
    own = tiny.copied(tmp_path / "models")
    name = f"{HIDDEN}-compiled"
    own.folder(HIDDEN).rename(own.folder(name))
    with opened(name, own.cache) as engine:
        engine._warm_up()
        graphs = counters["stats"]["unique_graphs"]
        assert graphs > 0, "nothing was compiled"
        for lengths in ([3, 40, 1], [7], [100, 2, 2, 90], [33], [2], [64, 64], [251], [500], [1]):
            engine.vectors(tasks_of(lease_of([[5] * length for length in lengths], MEAN)))
        assert counters["stats"]["unique_graphs"] == graphs

"""The Python door without a broker: what it accepts, what it refuses by name, files in and out."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fabric_pipelines import api, arguments
from fabric_pipelines.api import Fabric, read_prompts, write_table
from fabric_pipelines.errors import BrokerUnavailable, StorageFailed, UsageError, WrongRole
from fabric_pipelines.records.submission import Submission, fingerprint_of
from fabric_pipelines.settings import Settings
from fabric_pipelines.testing.word_tokeniser import WordTokeniser

GENERATE = "smollm2-135m-instruct@ctranslate2-int8"
EMBED = "all-minilm-l6-v2@onnxruntime-fp32"
HIDDEN = "smollm2-135m-instruct@onnxruntime-fp32"


@dataclass
class Desk:
    """A producer's client that keeps what it is given."""

    taken: list[tuple[Submission, list[pa.RecordBatch]]] = field(default_factory=list)

    def __enter__(self) -> Desk:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def submit(self, header: Submission, batches: Iterable[pa.RecordBatch], **_: object) -> None:
        self.taken.append((header, list(batches)))


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    made = Desk()
    monkeypatch.setattr(api.BrokerClient, "of", lambda *_, **__: made)
    monkeypatch.setattr("fabric_pipelines.models.tokeniser", lambda *_: WordTokeniser())
    return made


@pytest.fixture
def fabric(home_settings: Settings) -> Fabric:
    return Fabric(home_settings)


def test_texts_become_token_batches_with_totals_and_fingerprint(desk: Desk, fabric: Fabric) -> None:
    work = fabric.submit(function="embed", engine=EMBED, texts=["one two", "three"])
    [(header, batches)] = desk.taken
    assert (header.tasks, header.tokens) == (work.tasks, work.tokens) == (2, 3)
    assert (header.tasks, header.tokens, header.fingerprint) == fingerprint_of(batches)
    assert header.sampling == api.EMBED
    assert batches[0].column("source_row").to_pylist() == [0, 1]


def test_the_same_work_has_the_same_id_and_a_salt_makes_another(desk: Desk, fabric: Fabric) -> None:
    ids = [
        fabric.submit(function="generate", engine=GENERATE, tokens=[[1, 2]], **more).id
        for more in ({}, {}, {"salt": "again"}, {"max_new_tokens": 7}, {"sampling": api.GREEDY})
    ]
    assert ids[0] == ids[1] == ids[4]
    assert len(set(ids)) == 3


def test_large_work_is_cut_into_batches_that_keep_row_numbers_caps_and_metadata(
    desk: Desk, fabric: Fabric
) -> None:
    count = api.ROWS_PER_BATCH + 10
    fabric.submit(
        function="mine",
        engine=GENERATE,
        tokens=pa.array([[1]] * count, pa.list_(pa.uint32())),
        max_new_tokens=[1] * (count - 1) + [9],
        source_rows=list(range(100, 100 + count)),
        metadata=[b"x"] * count,
    )
    [(_, batches)] = desk.taken
    assert [batch.num_rows for batch in batches] == [api.ROWS_PER_BATCH, 10]
    last = batches[1].to_pylist()[-1]
    assert (last["source_row"], last["max_new_tokens"]) == (99 + count, 9)
    assert last["metadata"] == b"x"


def test_chat_wraps_each_text_as_a_turn(desk: Desk, fabric: Fabric) -> None:
    fabric.submit(function="generate", engine=GENERATE, texts=["hello"], chat=True)
    [(header, _)] = desk.taken
    assert header.tokens == 3


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"engine": "x@y", "texts": ["a"]}, "engine 'x@y' is unknown"),
        ({"engine": GENERATE}, "either texts or tokens"),
        ({"engine": GENERATE, "texts": ["a"], "tokens": [[1]]}, "not both"),
        ({"engine": GENERATE, "texts": "a"}, "one string"),
        ({"engine": GENERATE, "texts": []}, "nothing to submit"),
        (
            {"engine": GENERATE, "texts": ["a", ""]},
            r"texts\[1\] is empty; an empty prompt cannot be run",
        ),
        ({"engine": GENERATE, "tokens": [[1], []]}, r"tokens\[1\] is empty; an empty prompt"),
        ({"engine": GENERATE, "tokens": [[1]], "chat": True}, "chat wraps texts"),
        (
            {"engine": GENERATE, "tokens": [[1]], "max_new_tokens": 0},
            "max_new_tokens is 0; it must be a whole number from 1 to 4294967295",
        ),
        ({"engine": GENERATE, "tokens": [[1]], "max_new_tokens": -5}, "max_new_tokens is -5; it"),
        ({"engine": GENERATE, "tokens": [[1]], "max_new_tokens": 1 << 32}, "is 4294967296; it"),
        (
            {"engine": GENERATE, "tokens": [[1], [2]], "max_new_tokens": [3, 1.5]},
            r"max_new_tokens\[1\] is 1.5; it must be a whole number from 1",
        ),
        ({"engine": EMBED, "tokens": [[1]], "max_new_tokens": 5}, "single pass"),
        ({"engine": EMBED, "tokens": [[1]], "sampling": {"kind": "generate"}}, "does not do"),
        ({"engine": EMBED, "tokens": [[1]], "sampling": {"kind": "sing"}}, "'sing' is unknown"),
        ({"engine": HIDDEN, "tokens": [[1]]}, '"layers"'),
        ({"engine": GENERATE, "tokens": [[1]], "metadata": []}, "metadata has 0 entries for 1"),
    ],
)
def test_wrong_input_is_refused_by_name_before_anything_is_sent(
    desk: Desk, fabric: Fabric, wrong: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        fabric.submit(function="f", **wrong)
    assert desk.taken == []


LONE = "\ud800"
NAN = float("nan")
THING: Any = object()
NO_NAMES = ("", 5, None, True, b"f", ["f"], LONE, "a\0b", "a\nb", "n" * 201)
SUBMIT: dict[str, Any] = {"function": "f", "engine": GENERATE, "tokens": [[1], [2]]}
TEXTS: dict[str, Any] = {"function": "f", "engine": GENERATE, "texts": ["a", "b"], "tokens": None}
UNORDERED = ({"a": 1}, {1, 2}, 5, 1.5, NAN, True, b"ab", THING, iter([1]), np.array(1))
# argument -> (what goes with it, wrong values, what the sentence names for each)
WRONG_ARGUMENTS: list[tuple[str, dict[str, Any], tuple[Any, ...], str]] = [
    ("function", SUBMIT, NO_NAMES, "function is "),
    ("engine", SUBMIT, (*NO_NAMES, "x@y"), "engine (is|'x@y' is unknown)"),
    ("texts", TEXTS, (*UNORDERED, "ab"), "texts is .*; give a list of strings"),
    ("texts", TEXTS, ([], (), np.array([])), "nothing to submit: texts"),
    *(
        ("texts", TEXTS, (["a", wrong], ("a", wrong)), r"texts\[1\] is ")
        for wrong in (None, 5, b"b", LONE, f"b{LONE}", ["b"], "", NAN, {}, True)
    ),
    ("tokens", SUBMIT, (*UNORDERED, "ab"), "tokens is .*; give a list of lists of token ids"),
    ("tokens", SUBMIT, ([], pa.array([], pa.list_(pa.int64()))), "nothing to submit: tokens"),
    *(
        ("tokens", SUBMIT, ([[1], wrong], ([1], wrong)), r"tokens\[1\] is ")
        for wrong in (None, 5, "ab", b"ab", {1: 2}, {1}, [], (), iter([1]), NAN, np.array(1))
    ),
    *(
        ("tokens", SUBMIT, ([[1], [2, wrong]], ((1,), (2, wrong))), r"tokens\[1\]\[1\] is ")
        for wrong in (-1, 49_152, 1 << 32, 1 << 70, -(1 << 70), 1.0, 1.5, NAN, True, None, "2", [2])
    ),
    (
        "tokens",
        SUBMIT,
        (
            pa.array([[1], [2, -1]]),
            pa.array([[1], [2, None]]),
            pa.array([[1], [2, 49_152]], pa.large_list(pa.uint64())),
            pa.array([[1.0, 1.0], [2.0, 2.5]])[1:].take([0, 0]),
            pa.chunked_array([[[1]], [[2, -7]]]),
            [np.array([1]), np.array([2, -1])],
            np.array([[1, 2], [2, -1]]),
            [np.array([True, True])] * 2,
        ),
        r"tokens\[[01]\](\[[01]\])? is ",
    ),
    ("tokens", SUBMIT, (pa.array([[1], None]), pa.array([[1], []]), pa.array([3, 4])), r"tokens\["),
    ("sampling", SUBMIT, (5, "greedy", [1], True, NAN), "sampling is "),
    ("sampling", SUBMIT, ({5: 1}, {None: 1}), "a key of sampling is "),
    (
        "sampling",
        SUBMIT,
        tuple({**api.GREEDY, "x": x} for x in (NAN, float("inf"), LONE, THING, b"x", {1, 2})),
        "sampling is not JSON",
    ),
    (
        "sampling",
        SUBMIT,
        tuple({"kind": k} for k in (None, 5, [], True, {})),
        r"sampling\['kind'\]",
    ),
    ("sampling", SUBMIT, ({}, {"temperature": 0.0}), r"sampling\['kind'\] is None"),
    ("sampling", SUBMIT, ({"kind": "sing"},), "kind 'sing' is unknown"),
    ("sampling", SUBMIT, ({"kind": "generate", "topk": 1},), "fields topk are unknown"),
    *(
        (
            "sampling",
            SUBMIT,
            tuple({"kind": "generate", name: x} for x in wrong),
            rf"\['{name}'\] is ",
        )
        for name, wrong in {
            "temperature": (-0.1, 1e-45, "1", None, True, [0], 1e9),
            "top_k": (-1, 1.5, 1.0, "1", None, True, 1 << 31),
            "top_p": (-0.1, 0.0, 0, 1.1, "1", None, True),
            "seed": (-1, 1.5, "1", None, True, 1 << 63),
            "repetition_penalty": (-1, 0, 0.0, 1e7, "1", None, True),
        }.items()
    ),
    ("sampling", SUBMIT, ({"kind": "generate", "x": "y" * (1 << 19)},), "sampling takes 524"),
    (
        "max_new_tokens",
        SUBMIT,
        (0, -1, 1 << 32, 1 << 70, 1.0, 1.5, NAN, True, False, {1}, {1: 2}, b"7", THING, "7"),
        "max_new_tokens is ",
    ),
    *(
        ("max_new_tokens", SUBMIT, ([3, wrong], (3, wrong)), r"max_new_tokens\[1\] is ")
        for wrong in (0, -1, 1 << 32, 1 << 70, 1.0, 1.5, NAN, True, None, "7", [7])
    ),
    ("max_new_tokens", SUBMIT, ([], [1], [1, 2, 3]), "max_new_tokens has . entries for 2 tasks"),
    ("source_rows", SUBMIT, (*UNORDERED, "ab"), "source_rows is .*; give a list of numbers"),
    *(
        ("source_rows", SUBMIT, ([3, wrong], (3, wrong)), r"source_rows\[1\] is ")
        for wrong in (1 << 63, -(1 << 63) - 1, 1.0, 1.5, NAN, True, None, "7", [7])
    ),
    ("source_rows", SUBMIT, ([], [1], range(3)), "source_rows has . entries for 2 tasks"),
    ("metadata", SUBMIT, (*UNORDERED, "ab"), "metadata is .*; give a list of bytes"),
    *(
        ("metadata", SUBMIT, ([b"a", wrong], (b"a", wrong)), r"metadata\[1\] is ")
        for wrong in (None, "b", 5, [b"b"], True, LONE)
    ),
    ("metadata", SUBMIT, ([], [b"a"] * 3), "metadata has . entries for 2 tasks"),
    (
        "metadata",
        SUBMIT,
        ([b"", bytes(64 << 20)],),
        "task 1 takes 67108868 bytes .* cut it in parts",
    ),
    ("labels", SUBMIT, (5, "a", [1], {1}, True), "labels is "),
    ("labels", SUBMIT, ({5: "a"}, {None: "a"}, {LONE: "a"}), "a key of labels is "),
    ("labels", SUBMIT, ({"a": 5}, {"a": None}, {"a": LONE}, {"a": ["b"]}), r"labels\['a'\] is "),
    ("labels", SUBMIT, ({"a": "b" * (1 << 19)},), "labels take 524"),
    ("salt", SUBMIT, (None, 5, b"s", LONE, True, ["s"]), "salt is "),
    ("chat", SUBMIT, (None, 0, 1, "yes", []), "chat is .*; it must be True or False"),
    ("wait", SUBMIT, (None, 0, 1, "yes", []), "wait is .*; it must be True or False"),
    ("on_wait", SUBMIT, (5, "print", True, []), "on_wait is .*; it must be something to call"),
]


@pytest.mark.parametrize(
    ("name", "beside", "values", "sentence"),
    WRONG_ARGUMENTS,
    ids=[f"{row[0]}-{at}" for at, row in enumerate(WRONG_ARGUMENTS)],
)
def test_every_argument_of_submit_that_cannot_be_right_is_refused_by_name_and_row(
    desk: Desk, fabric: Fabric, name: str, beside: dict[str, Any], values: Any, sentence: str
) -> None:
    for value in values:
        with pytest.raises(UsageError, match=sentence) as refused:
            fabric.submit(**{**beside, name: value})
        assert len(str(refused.value)) < 400
        assert str(refused.value).isprintable()
    assert desk.taken == []


def test_the_table_of_wrong_arguments_has_every_argument_of_submit() -> None:
    asked = set(inspect.signature(Fabric.submit).parameters) - {"self"}
    assert {name for name, *_ in WRONG_ARGUMENTS} == asked


@pytest.mark.parametrize(
    "given",
    [
        [[1, 2], [3]],
        ((1, 2), range(3, 4)),
        [np.array([1, 2], np.uint8), [np.int64(3)]],
        [pa.array([1, 2]), [3]],
        pa.array([[1, 2], [3]], pa.large_list(pa.int32())),
        pa.chunked_array([[[1, 2]], [[3]]]),
        pa.array([[0], [1, 2], [3]])[1:],
    ],
    ids=lambda given: type(given).__name__,
)
def test_token_ids_are_taken_in_every_form_that_has_them_whole(
    desk: Desk, fabric: Fabric, given: Any
) -> None:
    fabric.submit(
        function="f",
        engine=GENERATE,
        tokens=given,
        source_rows=np.array([5, 6]),
        max_new_tokens=np.array([7, 8]),
        metadata=[bytearray(b"x"), memoryview(b"y")],
    )
    rows = desk.taken[0][1][0].to_pylist()
    assert rows == [
        {"tokens": [1, 2], "max_new_tokens": 7, "source_row": 5, "metadata": b"x"},
        {"tokens": [3], "max_new_tokens": 8, "source_row": 6, "metadata": b"y"},
    ]


def test_rows_that_are_right_are_judged_in_bulk(
    desk: Desk, fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A walk in Python costs twenty times as much, and would be noticed by nobody."""

    def walked(*_: object) -> None:
        raise AssertionError("a row was walked")

    monkeypatch.setattr(arguments, "_token_row", walked)
    monkeypatch.setattr(arguments, "whole", walked)
    for tokens in ([[1, 2], [3]], pa.array([[1, 2], [3]]), np.array([[1, 2], [3, 4]])):
        more = {"source_rows": [5, 6], "max_new_tokens": [7, 8]}
        fabric.submit(function="f", engine=GENERATE, tokens=tokens, **more)
    assert len(desk.taken) == 3


def test_a_wrong_row_is_counted_from_the_start_of_the_whole_submission(
    desk: Desk, fabric: Fabric
) -> None:
    rows: list[list[int]] = [[1]] * (2 * api.ROWS_PER_BATCH)
    rows[api.ROWS_PER_BATCH + 3] = [1, -1]
    with pytest.raises(UsageError, match=rf"tokens\[{api.ROWS_PER_BATCH + 3}\]\[1\] is -1"):
        fabric.submit(function="f", engine=GENERATE, tokens=rows)
    assert desk.taken == []


NO_PATHS = (5, None, True, b"x.csv", ["x"], "", "a\0b")
NO_IDS = ("", 5, None, True, b"a" * 64, "a" * 63, "A" * 64, LONE, ["a" * 64])
WRONG_CALLS: list[tuple[str, Any, tuple[Any, ...], str]] = [
    ("Fabric", lambda _, x: Fabric(x), (5, "home", {}, True), "settings is "),
    ("Fabric", lambda f, x: Fabric(f.settings, on_wait=x), (5, "print", True), "on_wait is "),
    ("submission", lambda f, x: f.submission(x), NO_IDS, "submission_id is "),
    ("progress", lambda f, x: f.progress(x), NO_IDS, "submission_id is "),
    ("results", lambda f, x: f.results(x), NO_NAMES, "what is "),
    ("to_polars", lambda f, x: f.to_polars(x), NO_NAMES, "what is "),
    *(
        (name, lambda f, x, n=name: work_of(f).wait(**{n: x}), wrong, f"{name} is ")
        for name, wrong in {
            "timeout_s": (-1, NAN, "5", True, [], b"5"),
            "on_progress": (5, "print", True, []),
            "on_wait": (5, "print", True, []),
        }.items()
    ),
    ("read_prompts", lambda _, x: read_prompts(x), NO_PATHS, "path is "),
    ("require_target", lambda _, x: api.require_target(x), NO_PATHS, "path is "),
    ("write_table", lambda _, x: write_table(pa.table({"a": [1]}), x), NO_PATHS, "path is "),
    ("write_table", lambda _, x: write_table(x, "x.csv"), (None, 5, [], {"a": [1]}), "table is "),
]


def work_of(fabric: Fabric) -> api.Work:
    return api.Work(fabric, "a" * 64, "f", GENERATE, 1, 1)


@pytest.mark.parametrize(("name", "call", "values", "sentence"), WRONG_CALLS)
def test_every_other_call_refuses_what_cannot_be_right_by_the_argument_s_name(
    desk: Desk, fabric: Fabric, name: str, call: Any, values: Any, sentence: str
) -> None:
    for value in values:
        with pytest.raises(UsageError, match=f"^{sentence}"):
            call(fabric, value)


def test_a_role_that_does_not_exist_is_refused_before_anything_is_opened(fabric: Fabric) -> None:
    for role in ("", "king", None, 5, LONE, ["producer"]):
        with pytest.raises(WrongRole, match=r"there is no role .*: roles are"):
            fabric.connect(role)  # type: ignore[arg-type]
    assert [api.is_submission_id(x) for x in (None, 5, [], "a" * 63, "a" * 64)] == [False] * 4 + [
        True
    ]


def test_without_a_broker_the_error_names_the_endpoint(fabric: Fabric) -> None:
    with pytest.raises(BrokerUnavailable, match=r"broker\.sock"):
        fabric.submit(function="generate", engine=GENERATE, tokens=[[1, 2]])


@pytest.mark.parametrize("content", ["", "\n", " \n\t\n", "\ufeff"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_file_without_a_prompt_is_said_to_be_empty(
    tmp_path: Path, name: str, content: str
) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(UsageError) as refused:
        read_prompts(path)
    wanted = "one JSON object a line" if name.endswith("l") else "one text a line"
    assert str(refused.value) == (
        f"{path} is empty, so there is nothing to submit: it takes {wanted}"
    )


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            {"tokens": [1], "max_new_tokens": -5},
            "line 1: max_new_tokens is -5; max_new_tokens must be a",
        ),
        ({"tokens": [1], "max_new_tokens": "7"}, 'max_new_tokens is "7"; .* from 0 to 4294967295'),
        ({"tokens": [1, -2, 3]}, r"line 1: tokens\[1\] is -2; tokens must be a list of token ids"),
        ({"tokens": "words"}, 'tokens is "words"; tokens must be'),
        ({"text": 5}, "text is 5; text must be a string"),
        ({"text": [7] * 99}, r"text is \[7, 7, .*\.\.\.; text must be a string"),
        ({"text": "a", "tokens": [1]}, "has both text and tokens"),
        ({"text": ""}, 'line 1: text is ""; text must be a string .* not empty'),
        ({"tokens": []}, r"line 1: tokens is \[\]; tokens must be .* not empty"),
        ({"text": "a", "metadata": LONE}, "line 1: metadata is .*; metadata must be JSON"),
    ],
)
def test_a_wrong_value_in_a_file_is_named_with_its_line_and_what_may_stand_there(
    tmp_path: Path, line: dict[str, Any], sentence: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(UsageError, match=sentence) as refused:
        read_prompts(path)
    assert str(path) in str(refused.value)
    assert len(str(refused.value)) < 300 + len(str(path))


def test_a_text_file_is_one_prompt_a_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first\n\nsecond\n")
    prompts = read_prompts(tmp_path / "a.txt")
    assert prompts.columns(5) == {
        "texts": ["first", "second"],
        "tokens": None,
        "max_new_tokens": 5,
        "metadata": None,
    }


def test_a_jsonl_file_carries_caps_and_metadata(tmp_path: Path) -> None:
    rows = [
        {"text": "a", "max_new_tokens": 3, "metadata": {"k": 1}},
        {"text": "b", "max_new_tokens": 4},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    prompts = read_prompts(tmp_path / "a.jsonl")
    assert prompts.columns(9) == {
        "texts": ["a", "b"],
        "tokens": None,
        "max_new_tokens": [3, 4],
        "metadata": [b'{"k":1}', b""],
    }


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "line 1 is not JSON"),
        ('{"text": ' + "[" * 100_000, "line 1 is not JSON"),
        ('{"text": "a", "metadata": 1e999}', "line 1: metadata is Infinity"),
        ('{"text": "a", "metadata": NaN}', "line 1 is not JSON"),
        ('{"text": "a"}\n[1]', "line 2 must be an object"),
        ('{"text": "a"}\n{"tokens": [1]}', "'text' in 1 of 2 lines"),
    ],
)
def test_a_broken_jsonl_file_is_refused_with_its_line(
    tmp_path: Path, content: str, sentence: str
) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UsageError, match=sentence):
        read_prompts(tmp_path / "a.jsonl")


def test_a_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_prompts(tmp_path / "none.txt")


def test_results_are_written_in_four_formats_and_read_back_equal(tmp_path: Path) -> None:
    table = pa.table(
        {
            "task_id": pa.array([1, 2], pa.int64()),
            "output": pa.array([[5, 6], None], pa.list_(pa.uint32())),
            "metadata": pa.array([b"\x00\xff", b""], pa.binary()),
        }
    )
    sizes = {
        suffix: write_table(table, tmp_path / f"out{suffix}")
        for suffix in (".parquet", ".arrow", ".csv", ".jsonl")
    }
    assert all(size == (tmp_path / f"out{name}").stat().st_size for name, size in sizes.items())
    assert pq.read_table(tmp_path / "out.parquet").equals(table)
    assert pl.read_ipc(tmp_path / "out.arrow")["task_id"].to_list() == [1, 2]
    assert (tmp_path / "out.csv").read_text().splitlines()[1] == '1,"[5, 6]","00ff"'
    first = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
    assert first == {"task_id": 1, "output": [5, 6], "metadata": "00ff"}
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"out{n}" for n in sorted(sizes)]


def test_a_table_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    table = pa.table({"a": [1]})
    with pytest.raises(UsageError, match="suffix"):
        write_table(table, tmp_path / "x.docx")
    with pytest.raises(UsageError, match=r"x\.csv cannot be written: make the folder"):
        write_table(table, tmp_path / "missing" / "x.csv")
    assert list(tmp_path.iterdir()) == []


def test_a_table_that_a_format_cannot_hold_and_a_name_that_no_file_has_are_one_sentence(
    tmp_path: Path,
) -> None:
    spans = pa.array([pa.scalar((1, 2, 3), pa.month_day_nano_interval())])
    for suffix in (".parquet", ".csv"):
        with pytest.raises(UsageError, match=rf"x\{suffix} cannot hold this table .*: write it as"):
            write_table(pa.table({"a": spans}), tmp_path / f"x{suffix}")
    assert write_table(pa.table({"a": spans}), str(tmp_path / "x.arrow")) > 0
    with pytest.raises(StorageFailed, match="File name too long"):
        write_table(pa.table({"a": [1]}), tmp_path / f"{'n' * 300}.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["x.arrow"]

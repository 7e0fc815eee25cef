"""The Python door without a broker: what it accepts, what it refuses by name, files in and out."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fabric_pipelines import api
from fabric_pipelines.api import Fabric, read_prompts, write_table
from fabric_pipelines.errors import BrokerUnavailable, UsageError
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
        ({"engine": GENERATE, "texts": ["a", ""]}, "text 1 is empty"),
        ({"engine": GENERATE, "tokens": [[1], []]}, "empty prompt in row 1"),
        ({"engine": GENERATE, "tokens": [[1]], "chat": True}, "chat wraps texts"),
        (
            {"engine": GENERATE, "tokens": [[1]], "max_new_tokens": 0},
            "max_new_tokens is 0; it must be a whole number from 1 to 4294967295",
        ),
        ({"engine": GENERATE, "tokens": [[1]], "max_new_tokens": -5}, "max_new_tokens is -5; it"),
        ({"engine": GENERATE, "tokens": [[1]], "max_new_tokens": 1 << 32}, "is 4294967296; it"),
        (
            {"engine": GENERATE, "tokens": [[1], [2]], "max_new_tokens": [3, 1.5]},
            "max_new_tokens of task 1 is 1.5; it must be a whole number from 1",
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

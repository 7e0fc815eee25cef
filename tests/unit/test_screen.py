"""What a person sees on 80 columns: one row a line, nothing broken in mid-word, nothing that must be copied cut."""

from __future__ import annotations

import io
import shutil
import sys
from dataclasses import fields, is_dataclass, replace

import pytest

from fabric_pipelines import screen
from fabric_pipelines.broker import replies
from fabric_pipelines.console import emit
from fabric_pipelines.quickstart import QuickstartReport
from fabric_pipelines.supervise import place
from fabric_pipelines.telemetry import ProgressBoard

SAMPLE = {
    "prompt": "Find the Greatest Common Divisor (GCD) of these numbers: 8, 7. Give only the GCD.\n"
    "Reply with the answer only.",
    "reply": "The GCD of 8 and 7 is\n\n5, since 8 and 7 have no other common divisor than 1 and that is all.",
    "passed": "False",
}
REPORT = QuickstartReport(
    tasks=1_056,
    tasks_ran=1_056,
    retired=1_056,
    dead=0,
    balance=0,
    tokens_in=30_139,
    tokens_out=674,
    rows_landed=1_056,
    vectors=800,
    receipt_id="ab" * 32,
    receipt_ok=True,
    recall_at_10=1.0,
    seconds=61.2,
    tokens_per_s=845.3,
    padding_waste=0.0773,
    model_pull_seconds=0.01,
    verifier_pass_rate=0.354,
    probe_accuracy=0.875,
    samples=[SAMPLE] * 10,
    paths={"tables": "fabric.generate, fabric.embed", "parquet": "/srv/fabric/lake"},
    run_id="r",
)


def test_the_summary_is_one_screen() -> None:
    lines = REPORT.summary(80).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    shown = " ".join(" ".join(lines).split())
    for words in ("balance 0", "tokens/s 845", "padding 7.7%", "recall@10 1.000", "abab verified"):
        assert words in shown


def test_each_text_is_one_line_with_its_verdict() -> None:
    said = [line for line in REPORT.summary(80).splitlines() if "→" in line]
    assert len(said) == 10
    assert all(line.startswith("  ✗ ") and line.endswith("…") for line in said)


def test_a_second_run_says_that_nothing_ran_and_whose_speed_it_shows() -> None:
    again = replace(REPORT, tasks_ran=0).summary(80)
    assert again.startswith("Nothing ran again: all 1,056 tasks")
    assert "tokens/s then" in again


def test_an_index_that_does_not_verify_is_said_so() -> None:
    assert "DOES NOT VERIFY" in replace(REPORT, receipt_ok=False).summary(80)


def test_a_table_keeps_numbers_whole_and_cuts_the_widest_words() -> None:
    rows = [{"engine": "e" * 60, "ready": 123_456_789, "pid": 12_345}]
    head, rule, row = screen.table(rows, ("engine", "ready", "pid"), 40)
    assert max(len(head), len(rule), len(row)) <= 40
    assert row.split() == ["e" * 19 + "…", "123,456,789", "12345"]


LETTERS = [
    {
        "task_id": 281_474_976_710_657 + at,
        "state": "dead",
        "function": "generate",
        "error_code": "Oversized",
        "attempts": 3,
        "consumer": "worker-cuda-0",
        "reason": f"prompt {at} has 9,000 tokens and the engine takes 2,048 at most, which the card cannot raise, so {at}",
    }
    for at in range(3)
]


@pytest.mark.parametrize("most", [40, 80, 100, 200])
def test_a_sentence_in_a_table_is_wrapped_below_its_row_and_never_cut(most: int) -> None:
    lines = screen.page({"letters": LETTERS}, most)
    flat = " ".join(" ".join(lines).split())
    for letter in LETTERS:
        assert str(letter["reason"]) in flat
        assert flat.index(str(letter["task_id"])) < flat.index(str(letter["reason"]))
    assert max(map(len, lines)) <= max(most, 86), "the narrowest that its words can be"


def test_where_nobody_looks_at_a_terminal_nothing_is_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    rows = [{**letter, "consumer": "w" * 90} for letter in LETTERS]
    emit({"letters": rows}, False)
    piped = capsys.readouterr().out.splitlines()
    assert len(piped) == 3 + len(rows), "one line a row: as it can be searched"
    for row, line in zip(rows, piped[3:], strict=True):
        assert line.endswith(str(row["reason"]))
        assert "w" * 90 in line
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    emit({"letters": rows}, False)
    shown = capsys.readouterr().out
    assert "w" * 90 not in shown
    assert str(rows[2]["reason"]) in " ".join(shown.split())


def test_a_page_puts_facts_first_and_wraps_lists_between_words() -> None:
    lines = screen.page(
        {"files": [{"role": "ids", "bytes": 5}], "columns": ["task_id"] * 12, "gone": None}, 40
    )
    assert lines[0].startswith("columns  task_id, ")
    assert all(len(line) <= 40 for text in lines for line in text.splitlines())
    assert lines[1:] == [
        "gone     -",
        "",
        "files",
        "  role  bytes",
        "  ────  ─────",
        "  ids       5",
    ]


def test_facts_are_never_cut() -> None:
    path = "/srv/" + "x" * 200
    assert screen.page({"home": path}, 80) == [f"home  {path}"]


def test_what_a_check_found_is_read_whole_on_any_width() -> None:
    sentence = (
        "vectors block of lists 0..15 (vectors/"
        + "a3" * 32
        + ".npy) of generation 1 is damaged in list 2"
    )
    rows = [{"what": "block", "expected": "1", "found": "2", "sentence": sentence}]
    for answer in ({"ok": False, "differences": rows}, {"ok": False, "differences": [sentence]}):
        lines = screen.page(answer, 40)
        assert sentence in " ".join(line.strip().removeprefix("- ") for line in lines)
        assert "…" not in "".join(lines)


IDS = 1_234_567


def test_a_number_that_tells_which_one_has_no_separators_wherever_it_stands() -> None:
    """first_task_id was once shown as 281,474,976,710,657: nobody can look that up."""
    names = sorted(id_names())
    assert {"first_task_id", "task_id", "lsn", "durable_lsn", "pid", "offset"} <= set(names)
    inside = {name: IDS for name in names}
    answer = {**inside, "rows": [inside, inside], "inner": inside, "task_ids": [IDS, IDS]}
    shown = "\n".join(screen.page(answer, 10_000))
    assert "1,234,567" not in shown
    assert shown.count(str(IDS)) == 4 * len(names) + 2 - ("task_ids" in names)
    assert screen.value(IDS, "retired_tokens") == "1,234,567"


def id_names() -> set[str]:
    """Of every value that a command shows or the wire carries: whole numbers that name something."""
    named = {"id", "ids", "lsn", "pid", "oid", "xid", "offset", "seed", "port", "incarnation"}
    modules = (replies, place)
    return {
        item.name
        for module in modules
        for kind in vars(module).values()
        if is_dataclass(kind)
        for item in fields(kind)
        if item.name.rpartition("_")[2] in named and "int" in str(item.type)
    } | {"task_id", "durable_lsn"}


def test_the_final_screen_says_what_must_run_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    lines = REPORT.summary(80).splitlines()
    at = lines.index("What to do next; the first starts what the others read from:")
    assert lines[at + 1].split()[:2] == ["fabric", "up"]
    assert not any("psql" in line for line in lines), "a command that is not installed"
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/psql")
    assert "psql" in REPORT.summary(80).splitlines()[-1]


def test_without_a_terminal_the_last_line_of_a_bar_is_its_end() -> None:
    stream = io.StringIO()
    with ProgressBoard(stream) as board:
        board.add("embed", 1000)
        board.add("empty", 0)
        for done in (0, 10, 999, 1000, 1000):
            board.advance_to("embed", done)
    assert stream.getvalue() == "embed: 1,000 / 1,000 tokens, done\n"

"""The Python door: submit text or token ids, wait or walk away, read results as Arrow or polars.

    from fabric_pipelines.api import Fabric

    fabric = Fabric()
    work = fabric.submit(function="embed", engine="all-minilm-l6-v2@onnxruntime-fp32", texts=["a", "b"])
    work.wait()
    work.results()          # pyarrow.Table, one row a task

Text is tokenised here, in bulk; the broker takes token ids only. The same content submitted twice is the same
submission (its id is a digest of what is asked for), so a script may simply be run again; `salt` asks for a
deliberate recomputation. Every failure is a member of errors.FabricError and names its remedy.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from fabric_pipelines import settings as settings_module
from fabric_pipelines.broker.client import BrokerClient
from fabric_pipelines.broker.patience import Patience
from fabric_pipelines.broker.replies import SubmissionState
from fabric_pipelines.errors import StorageFailed, UsageError
from fabric_pipelines.ids import canonical_json
from fabric_pipelines.ids import submission_id as submission_id_of
from fabric_pipelines.records.shape import require_function, sampling_kind
from fabric_pipelines.records.submission import Submission, fingerprint_of
from fabric_pipelines.records.task import task_batch
from fabric_pipelines.settings import Settings
from fabric_pipelines.worker.engines.registry import EngineSpec, engine_spec

if TYPE_CHECKING:
    import polars as pl

ROWS_PER_BATCH = 8192  # a few MB of token ids: one journal frame, one bounded resend
COUNT_MAX = (1 << 32) - 1  # of uint32, as token ids and caps travel
SHOWN_MAX = 60  # characters of a wrong value in a sentence
MAX_NEW_TOKENS = 128
GREEDY: Mapping[str, Any] = {"kind": "generate", "temperature": 0.0, "top_k": 1, "seed": 0}
EMBED: Mapping[str, Any] = {"kind": "embed", "pooling": "mean", "normalise": True}


@dataclass(frozen=True, slots=True)
class Work:
    """A submission that the broker has made durable. `id` is all that is needed to find it again, from
    another process too: `Fabric().submission(id)`."""

    fabric: Fabric
    id: str
    function: str
    engine: str
    tasks: int
    tokens: int

    def progress(self) -> SubmissionState:
        """Counts by state, now."""
        return self.fabric.progress(self.id)

    def wait(
        self,
        timeout_s: float | None = None,
        on_progress: Callable[[SubmissionState], None] | None = None,
    ) -> SubmissionState:
        """Until every task is retired (its result is durable) or dead. Nothing is lost by not waiting."""
        with self.fabric.connect("producer") as client:
            return client.wait(self.id, timeout_s=timeout_s, on_progress=on_progress)

    def results(self) -> pa.Table:
        """One row a retired task, in source order; rows are there as they land, before the end as well."""
        return self.fabric.results(self.id)

    def to_polars(self) -> pl.DataFrame:
        return self.fabric.to_polars(self.id)


class Fabric:
    """Holds settings and no connection: every call opens what it needs and closes it."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings_module.load() if settings is None else settings

    def connect(self, role: str) -> BrokerClient:
        return BrokerClient.of(self.settings, role=role)

    def submit(
        self,
        *,
        function: str,
        engine: str,
        texts: Sequence[str] | None = None,
        tokens: Sequence[Sequence[int]] | pa.Array | None = None,
        sampling: Mapping[str, Any] | None = None,
        max_new_tokens: int | Sequence[int] | None = None,
        chat: bool = False,
        source_rows: Sequence[int] | None = None,
        metadata: Sequence[bytes] | None = None,
        labels: Mapping[str, str] | None = None,
        salt: str = "",
        wait: bool = False,
        on_wait: Callable[[str], None] | None = None,
    ) -> Work:
        """Make the work durable in the broker and return; with `wait` once all of it is settled. A broker that is
        full or away is waited for, up to `room_wait_s` of the settings; `on_wait` gets a line before each wait.

        function: where results go: "generate", "embed", "hidden_states", or any name of your own
        engine: "model@runtime"; its part before "@" names the tokeniser of `texts`
        texts | tokens: exactly one of them; `chat` wraps each text as one user turn (generation)
        sampling: see records/shape.py; greedy decoding or mean-pooled unit vectors when left out
        max_new_tokens: cap of each output, one number or one a task; generation only
        source_rows: your own row numbers, 0.. when left out; metadata: opaque bytes; both come back
        Raises UsageError, ModelMissing, MissingDependency, BrokerUnavailable, Backpressure.
        """
        spec = engine_spec(engine)
        sampling = _sampling(spec, sampling)
        kind = sampling_kind(sampling)
        require_function(function, kind)
        caps = _caps(kind, max_new_tokens)
        prompts = self._prompts(spec, texts, tokens, chat)
        batches = list(_batches(prompts, caps, source_rows, metadata))
        count, token_count, fingerprint = fingerprint_of(batches)
        header = Submission(
            submission_id=submission_id_of(
                asset=f"api:{function}",
                partition=self.settings.tenant,
                code_version="api/1",
                input_version=fingerprint,
                engine_fingerprint=engine,
                sampling=sampling,
                salt=salt,
            ),
            function=function,
            engine=engine,
            sampling=sampling,
            vocab_size=spec.vocab_size,
            tasks=count,
            tokens=token_count,
            fingerprint=fingerprint,
            tenant=self.settings.tenant,
            labels=dict(labels or {}),
        )
        with self.connect("producer") as client:
            patience = Patience(self.settings.room_wait_s, on_wait)
            client.submit(header, batches, patience=patience)
        work = Work(self, header.submission_id, function, engine, count, token_count)
        if wait:
            work.wait()
        return work

    def submission(self, submission_id: str) -> Work:
        """The work of an earlier submit, by id; UsageError when the broker does not know it."""
        state = self.progress(submission_id)
        return Work(
            self, state.submission_id, state.function, state.engine, state.tasks, state.tokens
        )

    def progress(self, submission_id: str) -> SubmissionState:
        with self.connect("producer") as client:
            state = client.submission(submission_id)
        if state is None:
            raise UsageError(
                f"the broker knows no submission {submission_id[:12]}: `fabric status` tells what it holds"
            )
        return state

    def results(self, what: str) -> pa.Table:
        """All rows of a function, or of one submission when `what` is a submission id."""
        from fabric_pipelines.dataplane import results
        from fabric_pipelines.dataplane.database import Database

        database = Database.of(self.settings)
        if is_submission_id(what):
            return results.read(database, submission_id=what)
        return results.read(database, function=what)

    def to_polars(self, what: str) -> pl.DataFrame:
        """As `results`, as a polars frame."""
        import polars as pl

        frame = pl.from_arrow(self.results(what))
        assert isinstance(frame, pl.DataFrame)
        return frame

    def _prompts(
        self,
        spec: EngineSpec,
        texts: Sequence[str] | None,
        tokens: Sequence[Sequence[int]] | pa.Array | None,
        chat: bool,
    ) -> Sequence[Sequence[int]] | pa.Array:
        if (texts is None) == (tokens is None):
            raise UsageError("submit needs either texts or tokens, and not both")
        if isinstance(texts, str):
            raise UsageError("texts is one string; give a list of strings, one a task")
        given = texts if texts is not None else tokens
        assert given is not None
        if len(given) == 0:
            raise UsageError("there is nothing to submit: the list is empty")
        if texts is None:
            if chat:
                raise UsageError("chat wraps texts; with tokens, put the turns in yourself")
            return given
        empty = next((row for row, text in enumerate(texts) if not text), None)
        if empty is not None:
            raise UsageError(f"text {empty} is empty; an empty prompt cannot be run")
        from fabric_pipelines.models import tokeniser

        tool = tokeniser(spec.model, self.settings.models)
        return tool.encode_chat(texts) if chat else tool.encode(texts)


@dataclass(frozen=True, slots=True)
class Prompts:
    """What a file holds: texts or tokens, and columns that its lines may carry (None when no line does)."""

    texts: list[str] | None
    tokens: list[list[int]] | None
    max_new_tokens: list[int] | None
    metadata: list[bytes] | None

    def columns(self, max_new_tokens: int | None = None) -> dict[str, Any]:
        """Keyword arguments of Fabric.submit; the file's own caps win over `max_new_tokens`."""
        return {
            "texts": self.texts,
            "tokens": self.tokens,
            "max_new_tokens": self.max_new_tokens or max_new_tokens,
            "metadata": self.metadata,
        }


def read_prompts(path: Path) -> Prompts:
    """Prompts of a file: `.jsonl` has one object a line with `text` or `tokens`, and if wanted
    `max_new_tokens` and `metadata` (any JSON); any other file has one text a line, empty lines left out.
    Raises UsageError naming the line at fault."""
    try:
        # not splitlines: it also cuts at U+2028, U+0085 and form feeds, which JSON and prompts may hold
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as fault:
        raise UsageError(f"{path} is not UTF-8 text: {fault}") from fault
    except OSError as fault:
        raise UsageError(f"{path} cannot be read: {fault.strerror}") from fault
    if not any(line.strip() for line in lines):
        raise UsageError(
            f"{path} is empty, so there is nothing to submit: it takes "
            + ("one JSON object a line" if path.suffix == ".jsonl" else "one text a line")
        )
    if path.suffix != ".jsonl":
        return Prompts([line for line in lines if line.strip()], None, None, None)
    rows = [_json_line(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    metadata = [row.get("metadata") for row in rows]
    texts, tokens = _column(path, rows, "text"), _column(path, rows, "tokens")
    if texts is not None and tokens is not None:
        raise UsageError(f"{path} has both text and tokens in its lines: leave one of them out")
    return Prompts(
        texts,
        tokens,
        _column(path, rows, "max_new_tokens"),
        [b"" if item is None else canonical_json(item) for item in metadata]
        if any(item is not None for item in metadata)
        else None,
    )


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _is_text(item: Any) -> bool:
    return isinstance(item, str) and not any(0xD800 <= ord(sign) <= 0xDFFF for sign in item)


def _is_count(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= COUNT_MAX


def _are_ids(item: Any) -> bool:
    return isinstance(item, list) and all(map(_is_count, item))


FIELDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("text", _is_text, "a string without lone surrogates"),
    ("tokens", _are_ids, f"a list of token ids, whole numbers from 0 to {COUNT_MAX}"),
    ("max_new_tokens", _is_count, f"a whole number from 0 to {COUNT_MAX}"),
)


def _json_line(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line, parse_constant=_no_constant)
    except ValueError as fault:
        raise UsageError(f"{path} line {number} is not JSON: {fault}") from fault
    if not isinstance(row, dict) or not ({"text", "tokens"} & set(row)):
        raise UsageError(f"{path} line {number} must be an object with text or tokens")
    for name, fits, wanted in FIELDS:
        if name in row and not fits(row[name]):
            wrong = _wrong_of(name, row[name])
            raise UsageError(f"{path} line {number}: {wrong}; {name} must be {wanted}")
    return row


def _wrong_of(name: str, item: Any) -> str:
    """Which value is at fault, as JSON; the id itself in a list of ids."""
    if isinstance(item, list):
        at = next((at for at, part in enumerate(item) if not _is_count(part)), None)
        if at is not None:
            return f"{name}[{at}] is {_shown(item[at])}"
    return f"{name} is {_shown(item)}"


def _shown(item: Any) -> str:
    text = json.dumps(item)
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}..."


def _column(path: Path, rows: Sequence[Mapping[str, Any]], name: str) -> list[Any] | None:
    """The column `name` of all lines, None when no line has it; a column has no holes."""
    having = sum(name in row for row in rows)
    if having == 0:
        return None
    if having < len(rows):
        raise UsageError(f"{path} has {name!r} in {having} of {len(rows)} lines; give it in all")
    return [row[name] for row in rows]


def write_table(table: pa.Table, path: Path) -> int:
    """Write results in the format of the file's suffix, whole or not at all; returns its bytes."""
    require_target(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        WRITERS[path.suffix](table, beside)
        beside.replace(path)
    except OSError as fault:
        raise StorageFailed(f"{path} cannot be written: {fault.strerror or fault}") from fault
    finally:
        beside.unlink(missing_ok=True)
    return path.stat().st_size


def require_target(path: Path) -> None:
    """UsageError when `write_table` could not write there; ask before a long read."""
    if path.suffix not in WRITERS:
        raise UsageError(
            f"{path} has no suffix that is known; use one of {', '.join(sorted(WRITERS))}"
        )
    if not path.parent.is_dir():
        raise UsageError(f"{path} cannot be written: make the folder {path.parent} first")


def _write_parquet(table: pa.Table, path: Path) -> None:
    import pyarrow.parquet as pq

    pq.write_table(table, path)


def _write_arrow(table: pa.Table, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def _write_csv(table: pa.Table, path: Path) -> None:
    """Flat columns only: lists as JSON, bytes as hex."""
    import pyarrow.csv as csv

    csv.write_csv(_flat(table), path)


def _write_jsonl(table: pa.Table, path: Path) -> None:
    with path.open("w") as file:
        for batch in table.to_batches(max_chunksize=1024):
            for row in batch.to_pylist():
                file.write(json.dumps(row, default=_json_value) + "\n")


def _flat(table: pa.Table) -> pa.Table:
    columns = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if pa.types.is_nested(column.type) or pa.types.is_binary(column.type):
            columns[name] = [
                None if value is None else _json_value(value) for value in column.to_pylist()
            ]
        else:
            columns[name] = column
    return pa.table(columns)


def _json_value(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    return json.dumps(value) if isinstance(value, list) else str(value)


WRITERS: Mapping[str, Callable[[pa.Table, Path], None]] = {
    ".parquet": _write_parquet,
    ".arrow": _write_arrow,
    ".csv": _write_csv,
    ".jsonl": _write_jsonl,
}


def is_submission_id(what: str) -> bool:
    return len(what) == 64 and not set(what) - set("0123456789abcdef")


def _sampling(spec: EngineSpec, asked: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if asked is None:
        defaults = {"generate": GREEDY, "embed": EMBED}
        found = next((defaults[kind] for kind in sorted(spec.kinds) if kind in defaults), None)
        if found is None:
            raise UsageError(
                f"engine {spec.name} needs sampling, for example "
                '{"kind": "hidden", "layers": [8, 16, 30], "pooling": "last"}'
            )
        return found
    kind = sampling_kind(asked)
    if kind not in spec.kinds:
        raise UsageError(
            f"engine {spec.name} does not do {kind!r}; it does {', '.join(sorted(spec.kinds))}"
        )
    return asked


def _caps(kind: str, asked: int | Sequence[int] | None) -> int | Sequence[int]:
    if kind != "generate":
        if asked is not None and asked != 0:
            raise UsageError(f"max_new_tokens belongs to generation; {kind!r} is a single pass")
        return 0
    caps = MAX_NEW_TOKENS if asked is None else asked
    for row, cap in enumerate([caps] if isinstance(caps, int) else caps):
        if cap < 1 or cap > COUNT_MAX or cap != int(cap):
            which = "" if isinstance(caps, int) else f" of task {row}"
            raise UsageError(
                f"max_new_tokens{which} is {cap}; it must be a whole number from 1 to {COUNT_MAX}"
            )
    return caps


def _batches(
    prompts: Sequence[Sequence[int]] | pa.Array,
    caps: int | Sequence[int],
    source_rows: Sequence[int] | None,
    metadata: Sequence[bytes] | None,
) -> Iterator[pa.RecordBatch]:
    count = len(prompts)
    columns = {"max_new_tokens": caps, "source_rows": source_rows, "metadata": metadata}
    for name, column in columns.items():
        if column is not None and not isinstance(column, int) and len(column) != count:
            raise UsageError(f"{name} has {len(column)} entries for {count} tasks")
    rows = range(count) if source_rows is None else source_rows
    for start in range(0, count, ROWS_PER_BATCH):
        part = slice(start, start + ROWS_PER_BATCH)
        yield task_batch(
            prompts[part],
            max_new_tokens=caps if isinstance(caps, int) else caps[part],
            source_rows=rows[part],
            metadata=None if metadata is None else metadata[part],
        )

"""The Python door: submit text or token ids, wait or walk away, read results as Arrow or polars.

    from fabric_pipelines.api import Fabric

    fabric = Fabric()
    work = fabric.submit(function="embed", engine="all-minilm-l6-v2@onnxruntime-fp32", texts=["a", "b"])
    work.wait()
    work.results()          # pyarrow.Table, one row a task

Text is tokenised here, in bulk; the broker takes token ids only. The same content submitted twice is the same
submission (its id is a digest of what is asked for), so a script may simply be run again; `salt` asks for a
deliberate recomputation. Every failure is a member of errors.FabricError and names its remedy; an argument that
cannot be right is told by name, row and value (arguments.py) before anything is sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from fabric_pipelines import arguments, named_file
from fabric_pipelines import settings as settings_module
from fabric_pipelines.broker.client import BrokerClient
from fabric_pipelines.broker.credits import FRAME_BYTES_MAX
from fabric_pipelines.broker.keeper import keeper_of
from fabric_pipelines.broker.patience import Patience
from fabric_pipelines.broker.replies import SubmissionState
from fabric_pipelines.broker.roles import declared
from fabric_pipelines.errors import StorageFailed, UsageError
from fabric_pipelines.ids import canonical_json
from fabric_pipelines.ids import submission_id as submission_id_of
from fabric_pipelines.records.shape import KINDS, require_function, sampling_kind
from fabric_pipelines.records.submission import Submission, fingerprint_of
from fabric_pipelines.records.task import task_batch
from fabric_pipelines.settings import Settings
from fabric_pipelines.worker.engines.registry import EngineSpec, spec_of
from fabric_pipelines.worker.engines.sampling import pass_fields_objection, sampling_objection

if TYPE_CHECKING:
    import polars as pl

ROWS_PER_BATCH = 8192  # a few MB of token ids: one journal frame, one bounded resend
COUNT_MAX = arguments.UINT32_MAX  # as token ids and caps travel
MAX_NEW_TOKENS = 128
ANSWERED = "it answered before"
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
        on_wait: Callable[[str], None] | None = None,
    ) -> SubmissionState:
        """Until every task is retired (its result is durable) or dead; after `timeout_s` the state as it is. Nothing
        is lost by not waiting. A broker that is away is waited for, as `Fabric` says."""
        timeout_s = arguments.seconds("timeout_s", timeout_s)
        arguments.callback("on_progress", on_progress)
        patience = self.fabric.patience(arguments.callback("on_wait", on_wait))
        with self.fabric.answering() as client:
            return client.wait(
                self.id, timeout_s=timeout_s, on_progress=on_progress, patience=patience
            )

    def results(self) -> pa.Table:
        """One row a retired task, in source order; rows are there as they land, before the end as well."""
        return self.fabric.results(self.id)

    def to_polars(self) -> pl.DataFrame:
        return self.fabric.to_polars(self.id)


class Fabric:
    """Holds settings and no connection: every call opens what it needs and closes it.

    A broker that is full is waited for, up to `room_wait_s` of the settings, and so is one that is away if it answered
    this Fabric before or a supervisor (`fabric up`) of the home starts it again; where nothing runs at all the call
    fails at once. `on_wait` gets a line before each wait."""

    def __init__(
        self, settings: Settings | None = None, *, on_wait: Callable[[str], None] | None = None
    ) -> None:
        if settings is not None and not isinstance(settings, Settings):
            raise arguments.wrong(
                "settings", settings, "Settings, see fabric_pipelines.settings.load"
            )
        self.settings = settings_module.load() if settings is None else settings
        self._on_wait = arguments.callback("on_wait", on_wait)
        self._answered = False

    def connect(self, role: str) -> BrokerClient:
        """A client of the broker, which the caller closes. WrongRole for a role that does not exist."""
        declared(role)
        return BrokerClient.of(self.settings, role=role)

    def patience(self, on_wait: Callable[[str], None] | None = None) -> Patience:
        """How long one call waits for its broker."""
        say = self._on_wait if on_wait is None else on_wait
        return Patience(self.settings.room_wait_s, say, keeper=self._keeper)

    def _keeper(self) -> str:
        return keeper_of(self.settings) or (ANSWERED if self._answered else "")

    @contextmanager
    def answering(self) -> Iterator[BrokerClient]:
        """A producer's client for a call that, once it succeeds, shows that there is a broker."""
        with self.connect("producer") as client:
            yield client
            self._answered = True

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
        """Make the work durable in the broker and return; with `wait` once all of it is settled. `on_wait` in place of
        the one that this Fabric was made with.

        function: where results go: "generate", "embed", "hidden_states", or any name of your own
        engine: "model@runtime"; its part before "@" names the tokeniser of `texts`
        texts | tokens: exactly one of them; `chat` wraps each text as one user turn (generation)
        sampling: see records/shape.py; greedy decoding or mean-pooled unit vectors when left out
        max_new_tokens: cap of each output, one number or one a task; generation only
        source_rows: your own row numbers, 0.. when left out; metadata: opaque bytes; both come back
        Raises UsageError, ModelMissing, MissingDependency, BrokerUnavailable, Backpressure, StorageFailed. Before the
        broker is asked nothing was submitted; an error that comes later, in the middle of a large submission, leaves
        behind what was accepted so far, and that runs: `accepted_tasks` of `submission_tasks`. The same call once
        more sends the rest.
        """
        function = arguments.name("function", function)
        salt = arguments.free_text("salt", salt)
        wait, chat = arguments.flag("wait", wait), arguments.flag("chat", chat)
        arguments.callback("on_wait", on_wait)
        tags = arguments.labels(labels)
        spec = spec_of(arguments.name("engine", engine), self.settings.models)
        sampling = _sampling(spec, sampling)
        kind = sampling_kind(sampling)
        require_function(function, kind)
        columns = _columns(kind, max_new_tokens, source_rows, metadata)
        given, prompts = self._prompts(spec, texts, tokens, chat)
        # a task lies in one frame of one segment, with room for what is written beside it
        task_bytes_max = min(FRAME_BYTES_MAX, self.settings.segment_bytes) * 7 // 8
        batches = list(_batches(given, prompts, columns, spec.vocab_size, task_bytes_max))
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
            labels=tags,
        )
        with self.answering() as client:
            client.submit(header, batches, patience=self.patience(on_wait))
        work = Work(self, header.submission_id, function, engine, count, token_count)
        if wait:
            work.wait(on_wait=on_wait)
        return work

    def submission(self, submission_id: str) -> Work:
        """The work of an earlier submit, by id; UsageError when the broker does not know it."""
        state = self.progress(submission_id)
        return Work(
            self, state.submission_id, state.function, state.engine, state.tasks, state.tokens
        )

    def progress(self, submission_id: str) -> SubmissionState:
        """Counts by state, now; UsageError when the broker does not know it."""
        if not is_submission_id(submission_id):
            wanted = "the 64 hex digits that submit returned as `id`"
            raise arguments.wrong("submission_id", submission_id, wanted)
        with self.answering() as client:
            state = client.submission(submission_id, patience=self.patience())
        if state is None:
            raise UsageError(
                f"the broker knows no submission {submission_id[:12]}: `fabric status` tells what it holds"
            )
        return state

    def results(self, what: str) -> pa.Table:
        """All rows of a function, or of one submission when `what` is a submission id. UsageError for one that has
        no rows and is no function with a table of its own."""
        arguments.name("what", what)
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
    ) -> tuple[str, Any]:
        """(name of the argument that was given, one row of token ids a task)."""
        if (texts is None) == (tokens is None):
            raise UsageError("submit needs either texts or tokens, and not both")
        if texts is None:
            rows = arguments.column("tokens", tokens, "lists of token ids")
            if chat:
                raise UsageError("chat wraps texts; with tokens, put the turns in yourself")
        else:
            rows = arguments.texts("texts", texts)
        if len(rows) == 0:
            raise UsageError(
                f"there is nothing to submit: {'tokens' if texts is None else 'texts'} is an empty list"
            )
        if texts is None:
            return "tokens", rows
        from fabric_pipelines.models import tokeniser

        tool = tokeniser(spec.model, self.settings.models)
        return "texts", tool.encode_chat(rows) if chat else tool.encode(rows)


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


def read_prompts(path: str | Path) -> Prompts:
    """Prompts of a file: `.jsonl` has one object a line with `text` or `tokens`, and if wanted
    `max_new_tokens` and `metadata` (any JSON); any other file has one text a line, empty lines left out.
    Raises UsageError naming the line at fault."""
    path = arguments.path("path", path)
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
    return isinstance(item, str) and item != "" and arguments.is_utf8(item)


def _is_count(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= COUNT_MAX


def _are_ids(item: Any) -> bool:
    return isinstance(item, list) and item != [] and all(map(_is_count, item))


def _is_writable(item: Any) -> bool:
    try:
        canonical_json(item)
    except (ValueError, RecursionError):
        return False
    return True


FIELDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("text", _is_text, "a string without lone surrogates, not empty"),
    ("tokens", _are_ids, f"a list of token ids, whole numbers from 0 to {COUNT_MAX}, not empty"),
    ("max_new_tokens", _is_count, f"a whole number from 0 to {COUNT_MAX}"),
    ("metadata", _is_writable, "JSON without lone surrogates, and of numbers that JSON has"),
)


def _json_line(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as fault:
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
    return text if len(text) <= arguments.SHOWN_MAX else f"{text[: arguments.SHOWN_MAX]}..."


def _column(path: Path, rows: Sequence[Mapping[str, Any]], name: str) -> list[Any] | None:
    """The column `name` of all lines, None when no line has it; a column has no holes."""
    having = sum(name in row for row in rows)
    if having == 0:
        return None
    if having < len(rows):
        raise UsageError(f"{path} has {name!r} in {having} of {len(rows)} lines; give it in all")
    return [row[name] for row in rows]


def write_table(table: pa.Table, path: str | Path, *, replace: bool = False) -> int:
    """Write results in the format of the file's suffix, whole or not at all; returns its bytes. UsageError when the file is
    there and is not to be replaced."""
    path = require_target(path, replace=replace)
    if not isinstance(table, pa.Table):
        raise arguments.wrong("table", table, "a pyarrow.Table")
    try:
        with named_file.beside(path, replace=replace) as beside:
            WRITERS[path.suffix](table, beside)
    except OSError as fault:
        raise StorageFailed(f"{path} cannot be written: {fault.strerror or fault}") from fault
    except (pa.ArrowException, TypeError, ValueError) as fault:
        raise UsageError(
            f"{path} cannot hold this table ({str(fault).splitlines()[0][:160]}): write it as .arrow"
        ) from fault
    return path.stat().st_size


def require_target(path: str | Path, *, replace: bool = False) -> Path:
    """Where `write_table` writes; UsageError when it could not. Ask before a long read."""
    path = arguments.path("path", path)
    if path.suffix not in WRITERS:
        raise UsageError(
            f"{path} has no suffix that is known; use one of {', '.join(sorted(WRITERS))}"
        )
    if not path.parent.is_dir():
        raise UsageError(f"{path} cannot be written: make the folder {path.parent} first")
    named_file.require_free(path, replace=replace)
    return path


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


def is_submission_id(what: object) -> bool:
    return isinstance(what, str) and len(what) == 64 and not set(what) - set("0123456789abcdef")


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
    chosen = arguments.sampling(asked)
    if not isinstance(kind := chosen.get("kind"), str):
        raise arguments.wrong("sampling['kind']", kind, f"one of {', '.join(KINDS)}")
    kind = sampling_kind(chosen)
    if kind not in spec.kinds:
        raise UsageError(
            f"engine {spec.name} does not do {kind!r}; it does {', '.join(sorted(spec.kinds))}"
        )
    generates = kind == "generate"
    why = (
        sampling_objection(chosen, spec.generate_keys)
        if generates
        else pass_fields_objection(chosen, spec.layers)
    )
    if why is not None:
        raise UsageError(f"engine {spec.name} would refuse this sampling: {why}")
    return chosen


@dataclass(frozen=True, slots=True)
class _Columns:
    """What goes with the prompts, as it was given: one cap for all or one each, row numbers, metadata."""

    caps: Any
    source_rows: Any
    metadata: Any

    def require_rows(self, count: int) -> None:
        for name in ("max_new_tokens", "source_rows", "metadata"):
            column = getattr(self, "caps" if name == "max_new_tokens" else name)
            if column is not None and not isinstance(column, int) and len(column) != count:
                raise UsageError(f"{name} has {len(column)} entries for {count} tasks")


def _columns(kind: str, caps: Any, source_rows: Any, metadata: Any) -> _Columns:
    if kind != "generate":
        if caps is not None and (type(caps) is not int or caps != 0):
            raise UsageError(f"max_new_tokens belongs to generation; {kind!r} is a single pass")
        caps = 0
    elif caps is None:
        caps = MAX_NEW_TOKENS
    elif isinstance(caps, Integral | float) or not hasattr(caps, "__len__"):
        caps = arguments.whole("max_new_tokens", caps, 1, COUNT_MAX)
    else:
        caps = arguments.column("max_new_tokens", caps, "whole numbers")
    return _Columns(
        caps,
        None if source_rows is None else arguments.column("source_rows", source_rows, "numbers"),
        None if metadata is None else arguments.column("metadata", metadata, "bytes"),
    )


def _batches(
    given: str, prompts: Any, columns: _Columns, vocab_size: int, task_bytes_max: int
) -> Iterator[pa.RecordBatch]:
    count, caps = len(prompts), columns.caps
    columns.require_rows(count)
    rows = range(count) if columns.source_rows is None else columns.source_rows
    for start in range(0, count, ROWS_PER_BATCH):
        part = slice(start, start + ROWS_PER_BATCH)
        tokens = arguments.token_rows(given, prompts[part], start, vocab_size)
        metadata = None
        if columns.metadata is not None:
            metadata = arguments.bytes_rows("metadata", columns.metadata[part], start)
        arguments.require_sizes(tokens, metadata, start, task_bytes_max)
        yield task_batch(
            tokens,
            max_new_tokens=caps
            if isinstance(caps, int)
            else arguments.whole_rows(
                "max_new_tokens", caps[part], start, (1, COUNT_MAX), pa.uint32()
            ).to_pylist(),
            source_rows=arguments.whole_rows(
                "source_rows", rows[part], start, arguments.INT64, pa.int64()
            ),
            metadata=metadata,
        )

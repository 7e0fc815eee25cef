"""`fabric index ...` and `fabric search`: one call a command. An index in a folder: built, measured, asked.

A published shard is searched exactly by `fabric shard search`; this is for the choice between exact and faster.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fabric_pipelines.console import emit, settings_of
from fabric_pipelines.errors import UsageError
from fabric_pipelines.screen import plain

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from fabric_pipelines.analytics.index import VectorIndex

app = typer.Typer(
    no_args_is_help=True,
    help="Indexes in folders: exact, inverted file, lattice, and other libraries'; their recall.",
)

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the index lies.")]
Backend = Annotated[Literal["cpu", "cuda"], typer.Option(help="Where it is scanned.")]
Vectors = Annotated[str, typer.Option(help="Column of the vectors in a Parquet file.")]


@app.command("build")
def index_build(
    ctx: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder.")],
    shard: Annotated[str | None, typer.Option(help="Rows of the current generation of it.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="Rows of a Parquet file with ids and vectors.")
    ] = None,
    vector_column: Vectors = "vector",
    id_column: Annotated[str, typer.Option(help="Column of the ids.")] = "id",
    kind: Annotated[
        Literal["exact", "inverted", "lattice", "faiss", "cagra", "ivf_pq"],
        typer.Option(help="How it is searched; cagra and ivf_pq by cuVS, on a card."),
    ] = "inverted",
    metric: Annotated[
        Literal["cosine", "l2"] | None,
        typer.Option(help="Default: the shard's; cosine for a file."),
    ] = None,
    lists: Annotated[
        int | None, typer.Option(min=0, help="How many; default: the square root of the rows.")
    ] = None,
    bits: Annotated[
        int | None,
        typer.Option(
            min=2, max=8, help="Of a lattice code, a dimension (4); of a code of ivf_pq (8)."
        ),
    ] = None,
    parts: Annotated[
        int | None, typer.Option(min=0, help="Codes a row of ivf_pq; default: cuVS chooses.")
    ] = None,
    degree: Annotated[
        int | None, typer.Option(min=2, help="Edges a row of the graph of cagra; default: 64.")
    ] = None,
    factory: Annotated[
        str | None, typer.Option(help="Of kind faiss: its factory string; default: HNSW32.")
    ] = None,
    aim: Annotated[
        float | None, typer.Option(help="Recall that searches should have; default: 0.95.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the lists.")] = 0,
    as_json: Json = False,
) -> None:
    """Build an index from a shard or a file, measure its recall against exact search, and keep both."""
    from fabric_pipelines.analytics.index import RecallShort, VectorIndex
    from fabric_pipelines.analytics.index.kinds import kind_of

    chosen = {
        "lists": lists, "bits": bits, "parts": parts, "degree": degree, "factory": factory,
        "aim": aim,
    }  # fmt: skip
    given = {name: value for name, value in chosen.items() if value is not None}
    vectors, ids, own = _rows(ctx, shard, file, vector_column, id_column)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecallShort)  # said below, and in the answer
        index = VectorIndex.build(
            vectors, ids, kind=kind_of({"name": kind} | given), metric=metric or own, seed=seed
        )
    digest = index.save(folder)
    answer = {"folder": str(folder), "sha256": digest, "content_sha256": index.content_sha256()}
    answer |= _short(index)
    emit(answer | plain(index.stats()), as_json)


@app.command("recall")
def index_recall(
    ctx: typer.Context,
    folder: Folder,
    k: Annotated[int, typer.Option("--k", "-k", help="Neighbours that are asked for.")] = 10,
    plot: Annotated[
        Path | None, typer.Option(help="Write recall against latency as PNG here.")
    ] = None,
    backend: Backend = "cpu",
    as_json: Json = False,
) -> None:
    """Recall against exact search and milliseconds a query, on this machine, for every effort."""
    from fabric_pipelines.analytics.index import VectorIndex
    from fabric_pipelines.analytics.index.tradeoff import picture, tradeoff

    settings_of(ctx)
    index = VectorIndex.load(folder, backend=backend)
    steps = tradeoff(index, k)
    stats = index.stats()
    if plot:
        title = f"{stats.kind}, {stats.rows:,} x {stats.dim}, {stats.metric}, recall@{k}"
        try:
            plot.write_bytes(picture(steps, title))
        except OSError as fault:
            raise UsageError(f"{plot} cannot be written: {fault.strerror}") from fault
    answer = {"folder": str(folder), "kind": stats.kind, "metric": stats.metric, "k": k}
    answer |= {"where": stats.where}
    emit(answer | {"rows": stats.rows, "steps": [plain(step) for step in steps]}, as_json)


def search(
    ctx: typer.Context,
    folder: Folder,
    like: Annotated[
        list[int] | None, typer.Option(help="Id of a row of the index; may be repeated.")
    ] = None,
    queries: Annotated[Path | None, typer.Option(help="Parquet file with vectors.")] = None,
    vector_column: Vectors = "vector",
    k: Annotated[int, typer.Option("--k", "-k", help="How many neighbours.")] = 10,
    nprobe: Annotated[int | None, typer.Option(help="Lists to look at; default: measured.")] = None,
    rerank: Annotated[
        int | None, typer.Option(help="Candidates ranked by their rows; default: measured.")
    ] = None,
    health: Annotated[
        bool, typer.Option("--health", help="And what the search met: lists that gave nothing.")
    ] = False,
    record: Annotated[
        bool, typer.Option(help="With --health: keep the verdicts on lists in the folder.")
    ] = False,
    backend: Backend = "cpu",
    as_json: Json = False,
) -> None:
    """The nearest rows of an index for rows of it or for queries of a file, nearest first."""
    import numpy as np

    from fabric_pipelines.analytics import rules
    from fabric_pipelines.analytics.decisions import counts as counted
    from fabric_pipelines.analytics.index import VectorIndex, verdicts
    from fabric_pipelines.analytics.index.files import read_queries

    given = settings_of(ctx).health_rules
    table = rules.load(Path(given) if given else None)
    if record and not health:
        raise UsageError("what is recorded? --record keeps what --health finds: give both")
    if bool(like) == bool(queries):
        raise UsageError("what is searched for? give --like ID, or --queries FILE")
    index = VectorIndex.load(folder, backend=backend)
    if queries:
        xq: Any = read_queries(queries, vector_column)
        names = list(range(len(xq)))
    else:
        names = list(like or ())
        xq = index.rows_of(np.array(names, np.int64))
    told = index.search(xq, k, nprobe=nprobe, rerank=rerank, health=health)
    D, I, found = told  # noqa: E741
    what = "query" if queries else "like"
    rows = [
        {what: name, "id": int(I[at, place]), "distance": float(D[at, place])}
        for at, name in enumerate(names)
        for place in range(int(found[at]))
    ]
    answer = {"folder": str(folder), "kind": index.kind.name, "metric": index.metric}
    answer |= {"where": index.stats().where} | _short(index)
    shown = answer | {"rows": rows}
    if told.health is not None:
        met = told.health
        counts = {name: getattr(met, name) for name in ("ranked", "nonfinite", "norm_changed")}
        counts |= {"probes": int(met.probe.sum()), "wasted_probes": int(met.wasted.sum())}
        shown |= counts
        lists = {name: getattr(met, name).tolist() for name in ("probe", "hit", "wasted", "margin")}
        wide, _ = index.effort(k, nprobe, rerank)
        decisions = verdicts.judge(index, met, wide, table, folder)
        if record:
            verdicts.record(folder, decisions, table)
        noted = [
            each for each in decisions if each.pending or each.verdict is not rules.Verdict.KEEP
        ]
        said = {name: count for name, count in counted(decisions).items() if count}
        shown |= {"verdicts": said, "decisions": list(map(str, noted))}
        told_of = {"verdicts": said, "decisions": [each.to_json() for each in decisions]}
        answer |= {"health": counts | lists | told_of}
    emit(answer | {"found": found.tolist(), "rows": rows}, as_json, shown=shown)


def _short(index: VectorIndex[Any]) -> dict[str, str]:
    """Said aloud, and for the answer: that the index does not reach the recall that it was built for."""
    said = index.shortfall()
    if said:
        typer.echo(f"warning: {said}", err=True)
    return {"recall_short": said} if said else {}


def _rows(
    ctx: typer.Context, shard: str | None, file: Path | None, vector_column: str, id_column: str
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], Any]:
    """Vectors, ids and the metric that goes with them."""
    settings = settings_of(ctx)
    if bool(shard) == bool(file):
        raise UsageError("what is it built from? give --shard NAME, or --file FILE")
    if file:
        from fabric_pipelines.analytics.index.files import read_rows

        return *read_rows(file, vector_column, id_column), "cosine"
    from fabric_pipelines import shards
    from fabric_pipelines.dataplane.database import Database

    assert shard is not None, "neither a shard nor a file"
    with shards.open_shard(Database.of(settings), settings.shards_dir, shard) as opened:
        return opened.vectors(), opened.ids(), opened.manifest.metric

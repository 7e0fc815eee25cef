"""A shard is made of all rows of its relation that the filter keeps: rows that a policy hides are never left out in silence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fabric_pipelines import receipts, shards
from fabric_pipelines.dataplane import staleness
from fabric_pipelines.dataplane.database import Database
from fabric_pipelines.dataplane.source import Source
from fabric_pipelines.errors import SchemaError
from tests.services.test_ids_of_a_source import PLAIN, docs, run
from tests.support import ON_EVERY_SERVER

HIDE = (
    "alter table docs enable row level security",
    "create policy few on docs using (task_id <= 10)",
)


@pytest.fixture
def guest(database: Database) -> Iterator[Database]:
    """A role that owns nothing and may read and write everything of the fabric, and a table of documents."""
    docs(database, "bigint")
    for what in (
        "create role lodger login",
        "grant usage on schema fabric, public to lodger",
        "grant all on all tables in schema fabric to lodger",
        "grant select on docs to lodger",
    ):
        run(database, what)
    yield Database(database.url.replace("postgres@", "lodger@"))
    run(database, "drop owned by lodger", "drop role lodger")


def said(database: Database) -> tuple[str, str]:
    (found,) = staleness.staleness(database, "corpus")
    return found.verdict, found.log


@ON_EVERY_SERVER
def test_a_policy_that_comes_later_is_a_verdict_for_whom_it_applies_to(
    database: Database, guest: Database, tmp_path: Path
) -> None:
    shards.build(database, tmp_path, "corpus", **PLAIN)
    receipt = receipts.issue(database, tmp_path, "corpus")
    assert said(guest) == ("fresh", "complete")
    run(database, *HIDE)
    assert (said(guest), said(database)) == (("audit", "row security"), ("fresh", "complete"))
    assert "bypassrls" in staleness.staleness(guest)[0].why
    for ask in (
        lambda: shards.refresh(guest, tmp_path, "corpus"),
        lambda: shards.refresh(guest, tmp_path, "corpus", anew=True),
        lambda: shards.audit(guest, tmp_path, "corpus"),
    ):
        with pytest.raises(
            SchemaError, match="row level security of docs applies to role 'lodger'"
        ):
            ask()
    (found,) = receipts.verify(guest, tmp_path, receipt.receipt_id).differences
    assert (found.what, found.found) == ("source", "unreadable")
    run(database, "alter role lodger bypassrls")
    assert said(guest) == ("fresh", "complete")
    assert receipts.verify(guest, tmp_path, receipt.receipt_id).ok


def test_a_role_from_which_rows_may_be_hidden_builds_and_watches_nothing(
    database: Database, guest: Database, tmp_path: Path
) -> None:
    run(
        database,
        *HIDE,
        "alter table docs owner to lodger",
        "alter table docs force row level security",
    )
    for ask in (
        lambda: shards.build(guest, tmp_path, "corpus", **PLAIN),
        lambda: staleness.watch(guest, Source("docs")),
    ):
        with pytest.raises(SchemaError, match=r"alter role \"lodger\" bypassrls"):
            ask()
    assert run(database, "select from pg_trigger where tgrelid = 'docs'::regclass") == []
    assert shards.build(database, tmp_path, "corpus", **PLAIN).manifest.rows == 60


def test_the_id_column_does_not_travel_beside_itself(database: Database, tmp_path: Path) -> None:
    docs(database, "bigint")
    for column in ("task_id", "vector"):
        with pytest.raises(
            SchemaError, match=f"column '{column}' of docs is in every shard already"
        ):
            shards.build(database, tmp_path, "corpus", **PLAIN, columns=("source_row", column))
    shards.build(database, tmp_path, "corpus", **PLAIN)
    receipt = receipts.issue(database, tmp_path, "corpus")
    assert receipts.verify(database, tmp_path, receipt.receipt_id).ok


def test_a_submission_is_asked_only_of_a_relation_that_has_them(
    database: Database, tmp_path: Path
) -> None:
    docs(database, "bigint")
    with pytest.raises(SchemaError, match="'docs' has no column 'submission_id'"):
        shards.build(database, tmp_path, "corpus", **PLAIN, submission_id="a")
    run(database, "alter table docs add submission_id uuid")
    with pytest.raises(SchemaError, match="submission_id of docs is compared with no text"):
        shards.build(database, tmp_path, "corpus", **PLAIN, submission_id="a")

"""Rows and queries of an index from a Parquet file: one column of vectors, one of ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fabric_pipelines.analytics.index.store import F32
from fabric_pipelines.analytics.search import Ids
from fabric_pipelines.errors import UsageError


def read_rows(path: Path, vector_column: str, id_column: str) -> tuple[F32, Ids]:
    """vectors float32 [n, d] and ids int64 [n]. UsageError naming the column that cannot be read as that."""
    table = _read(path, [vector_column, id_column])
    try:
        ids = table.column(id_column).combine_chunks().cast(pa.int64()).to_numpy()
    except (pa.ArrowException, ValueError) as fault:
        raise UsageError(f"column {id_column!r} of {path} has no int64 ids: {fault}") from fault
    return _vectors(table, path, vector_column), ids.astype(np.int64)


def read_queries(path: Path, vector_column: str) -> F32:
    """float32 [q, d]."""
    return _vectors(_read(path, [vector_column]), path, vector_column)


def _read(path: Path, columns: list[str]) -> Any:
    try:
        there = pq.read_schema(path).names
        lacking = [name for name in columns if name not in there]
        if lacking:
            raise UsageError(f"{path} has no column {lacking[0]!r}, but {', '.join(there)}")
        return pq.read_table(path, columns=sorted(set(columns)))
    except (OSError, pa.ArrowException) as fault:
        raise UsageError(f"{path} cannot be read as Parquet: {fault}") from fault


def _vectors(table: Any, path: Path, name: str) -> F32:
    column = table.column(name).combine_chunks()
    lists = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    fixed = pa.types.is_fixed_size_list(column.type)
    if not (lists or fixed) or not pa.types.is_floating(column.type.value_type):
        raise UsageError(f"column {name!r} of {path} is {column.type}, not a list of floats a row")
    if column.null_count:
        raise UsageError(f"column {name!r} of {path} has {column.null_count} rows without a vector")
    flat = column.flatten().to_numpy(zero_copy_only=False).astype(np.float32)
    count = len(column)
    lengths = np.diff(column.offsets.to_numpy()) if lists else np.full(count, column.type.list_size)
    if count and (lengths != lengths[0]).any():
        raise UsageError(
            f"vectors of column {name!r} of {path} have {lengths.min()} to {lengths.max()} dimensions"
        )
    vectors: F32 = flat.reshape(count, int(lengths[0]) if count else 1)
    return vectors

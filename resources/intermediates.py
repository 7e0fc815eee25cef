"""Values that pass from op to op inside one asset: JSON or Arrow, never pickle.

A table becomes an Arrow file, a mapping of tables a folder of them, anything else must be plain JSON. What is
none of these is refused by name: an object that only this process understands has no place between two.
Results never come this way; they are written by the fabric's own writers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import dagster as dg
import pyarrow as pa
from pydantic import Field

from fabric_pipelines.errors import SchemaError, StorageFailed
from fabric_pipelines.settings import load


class ArrowJsonIOManager(dg.ConfigurableIOManager):
    base: str = Field(default="", description="folder; empty: <FABRIC_HOME>/dagster/intermediates")

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        path = self._path(context)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, obj, context.name)
        except OSError as fault:
            raise StorageFailed(f"{path} cannot be written: {fault}") from fault

    def load_input(self, context: dg.InputContext) -> Any:
        assert context.upstream_output is not None
        return _read(self._path(context.upstream_output))

    def _path(self, context: dg.OutputContext) -> Path:
        base = Path(self.base) if self.base else load().dagster_home / "intermediates"
        return base.joinpath(*context.get_identifier())


def _write(path: Path, value: Any, name: str) -> None:
    if isinstance(value, pa.Table):
        _write_table(path.with_suffix(".arrow"), value)
    elif isinstance(value, dict) and value and all(isinstance(v, pa.Table) for v in value.values()):
        path.mkdir(exist_ok=True)
        for key, table in value.items():
            _write_table(path / f"{quote(str(key), safe='')}.arrow", table)
    else:
        try:
            text = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as fault:
            raise SchemaError(f"output {name!r} is neither Arrow nor JSON: {fault}") from fault
        path.with_suffix(".json").write_text(text)


def _write_table(path: Path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def _read(path: Path) -> Any:
    if path.is_dir():
        return {
            unquote(item.name.removesuffix(".arrow")): _read_table(item)
            for item in sorted(path.iterdir())
        }
    if path.with_suffix(".arrow").exists():
        return _read_table(path.with_suffix(".arrow"))
    return json.loads(path.with_suffix(".json").read_text())


def _read_table(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()

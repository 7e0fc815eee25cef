"""Op intermediates: JSON and Arrow pass, anything else is refused, nothing is pickled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from fabric_pipelines.errors import SchemaError
from resources.intermediates import ArrowJsonIOManager

TABLE = pa.table({"a": [1, 2, 3]})


def passed(tmp_path: Path, value: Any) -> Any:
    seen: list[Any] = []

    @dg.op(out=dg.Out(dg.Any))
    def give():
        return value

    @dg.op(ins={"value": dg.In(dg.Any)})
    def take(value):
        seen.append(value)

    @dg.job(resource_defs={"io_manager": ArrowJsonIOManager(base=str(tmp_path))})
    def through():
        take(give())

    through.execute_in_process(
        run_config={"loggers": {"console": {"config": {"log_level": "ERROR"}}}}
    )
    return seen[0]


@pytest.mark.parametrize(
    "value",
    [{"a": [1, 2.5, None]}, [], "text", TABLE, {"": TABLE, "2 Kings/x": TABLE.slice(1)}],
    ids=["json", "empty list", "text", "table", "tables"],
)
def test_a_value_comes_back_equal(tmp_path: Path, value: Any) -> None:
    assert passed(tmp_path, value) == value
    files = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert all(name.endswith((".json", ".arrow")) for name in files)


def test_an_object_of_this_process_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="output 'result' is neither Arrow nor JSON"):
        passed(tmp_path, object())

"""The workloads by name: what assets, the command and quickstart go through."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from fabric_pipelines.workloads import embeddings, hidden_states, probes, synthetic
from fabric_pipelines.workloads.corpus import BOOKS
from fabric_pipelines.workloads.request import WHOLE, EngineChoice, Prepared, Tokeniser

Prepare = Callable[[Mapping[str, Any], EngineChoice, Tokeniser, str], Prepared]
Results = Callable[[Mapping[str, Any], pa.Table], pa.Table]


@dataclass(frozen=True, slots=True)
class Workload:
    """request: the frozen dataclass of what may be asked; prepare: request to tasks; results: landed rows of one
    submission to the table that is published; partitions: (WHOLE,) or the names of the corpus' parts."""

    name: str
    engine: str
    function: str
    code_version: str
    request: type
    prepare: Prepare
    results: Results
    partitions: tuple[str, ...] = (WHOLE,)


WORKLOADS: Mapping[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload(
            synthetic.NAME,
            synthetic.ENGINE,
            synthetic.FUNCTION,
            synthetic.CODE_VERSION,
            synthetic.SyntheticRequest,
            synthetic.prepare_synthetic,
            synthetic.results,
        ),
        Workload(
            probes.NAME,
            probes.ENGINE,
            probes.FUNCTION,
            probes.CODE_VERSION,
            probes.ProbesRequest,
            probes.prepare_probes,
            probes.results,
        ),
        Workload(
            hidden_states.NAME,
            hidden_states.ENGINE,
            hidden_states.FUNCTION,
            hidden_states.CODE_VERSION,
            hidden_states.HiddenStatesRequest,
            hidden_states.prepare_hidden_states,
            hidden_states.results,
            BOOKS,
        ),
        Workload(
            embeddings.NAME,
            embeddings.ENGINE,
            embeddings.FUNCTION,
            embeddings.CODE_VERSION,
            embeddings.EmbeddingsRequest,
            embeddings.prepare_embeddings,
            embeddings.results,
        ),
    )
}

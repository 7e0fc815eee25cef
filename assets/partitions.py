"""How corpora are cut: a book of the verse corpus is a partition, named in the corpus' order."""

from __future__ import annotations

import dagster as dg

from fabric_pipelines.workloads.corpus import BOOKS

books = dg.StaticPartitionsDefinition(list(BOOKS))

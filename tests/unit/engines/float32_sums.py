"""The embedded engine of generation with sums in float32, where a greedy answer does not depend on its company."""

from __future__ import annotations

from typing import Any

from fabric_pipelines.worker.engines.door import Engine


def float32_sums(engine: Engine) -> Any:
    """Exchanges the runtime of an open Ctranslate2Engine; the new one."""
    import ctranslate2

    folder = engine._folder.path  # type: ignore[attr-defined]
    library = ctranslate2.Generator(str(folder), compute_type="float32", intra_threads=1)
    engine._generator = library  # type: ignore[attr-defined]
    return library

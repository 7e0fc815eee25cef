"""The measurement measures what it says, on a tiny model."""

from __future__ import annotations

from fabric_pipelines.bench.engines import GREEDY, Case, measure
from fabric_pipelines.worker.engines.door import Engine
from tests.tiny_models import TOKENS


def test_a_figure_counts_the_tokens_of_its_own_case(generate: Engine) -> None:
    cases = [Case(2, 12, 3, GREEDY), Case(4, 6, 2, GREEDY)]
    figures = list(measure(generate, cases, len(TOKENS)))
    assert [figure.prompt_tokens for figure in figures] == [24, 24]
    assert 2 <= figures[0].output_tokens <= 6
    assert all(figure.seconds > 0 and figure.rss > 0 for figure in figures)
    assert "tok/cpu-s" in figures[0].line()

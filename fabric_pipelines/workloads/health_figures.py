"""The pictures of a health table: what lies where, how far rows are from their mean and from the next one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics.health import HealthTable
from fabric_pipelines.analytics.projection import plane
from fabric_pipelines.workloads import figures


def drawn(health: HealthTable, odd: npt.NDArray[np.bool_]) -> dict[str, str]:
    """SVG by name: health_map, radii, margins (none where its pass was left out) and cluster_map. odd [K]: clusters that are marked."""
    facts = health.facts
    names = list(health.readings)
    values = np.stack([health.readings[name].value for name in names], axis=1)
    clusters = [str(number) for number in range(health.clusters)]
    radii = np.sqrt(facts.radii.radius2[facts.admission.good])
    places, share = plane(facts.centroids.mean, facts.size)
    found = {
        "health_map": figures.health_map(values, clusters, names),
        "radii": figures.radius_histogram(radii),
    }
    if facts.points is not None:
        found["margins"] = figures.margin_histogram(facts.points.margins)
    return found | {"cluster_map": figures.cluster_map(places, facts.size, odd, share)}

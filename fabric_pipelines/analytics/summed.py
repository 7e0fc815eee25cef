"""What metrics read, from numbers a cluster alone: the facts of P1, P2, P3 and P8 where a device sums over rows by itself.

Arrays of rows are empty here, and so are means and what nobody asked for is NaN: only metrics of READ may be read of them.
"""

from __future__ import annotations

import numpy as np

from fabric_pipelines.analytics.csr import Csr, unknown
from fabric_pipelines.analytics.passes import (
    MARGIN_BINS,
    Admission,
    Centroids,
    Points,
    Radii,
)
from fabric_pipelines.analytics.readings import Facts, Reference
from fabric_pipelines.analytics.sweeps import Summed

ORDERED = "centroid_margin_p10"  # what is no sum
PASSES = ("P1", "P2", "P3", "P8")
READ = frozenset(
    {
        "bad_row_fraction",
        "norm_drift",
        "size",
        "medoid_offset",
        "rms_radius",
        "silhouette",
        "silhouette_negative_fraction",
        "boundary_fraction",
        ORDERED,
    }
)


def facts(csr: Csr, found: Summed, *, cosine: bool, reference: Reference | None) -> Facts:
    none, nobody = np.empty(0), unknown(csr.clusters)
    sizes, zeros = csr.sizes, np.zeros(csr.clusters, np.uint64)
    return Facts(
        cosine=cosine,
        reference=reference,
        admission=Admission(
            good=np.empty(0, np.bool_),
            norm=none,
            hash=np.empty((0, 2), np.uint64),
            size_raw=sizes,
            size=found.size,
            bad=sizes - found.size,
            nan=found.nan,
            inf=found.inf,
            zero=found.zero,
            norm_sum=found.norm,
            norm2_sum=found.norm2,
            digest_sum=zeros,
            digest_xor=zeros,
        ),
        centroids=Centroids(none, np.empty((0, csr.dim)), nobody, found.length2),
        radii=Radii(
            radius2=none,
            within=found.within,
            mean_radius=found.radius / np.maximum(found.size, 1),
            least_radius=found.least,
            medoid=found.least_id,
        ),
        points=Points(
            silhouette_sum=found.silhouette,
            negative=found.negative,
            narrow=found.narrow,
            misassigned=found.misassigned,
            margin_p10=found.margin_p10,
            own_error=found.error,
            margins=np.zeros(MARGIN_BINS, np.int64),
        ),
        order=None,
        pairs=None,
        robust=None,
        spectrum=None,
        neighbours=None,
        graph=None,
        gauss=None,
        halves=None,
    )

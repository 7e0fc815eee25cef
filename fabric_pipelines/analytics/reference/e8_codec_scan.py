"""Twin of cuda/e8_codec_scan.cu: a code is decoded bit by bit, products are whole numbers, scores float32 in one order."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.analytics.reference.e8_codec import values

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]


def decoded(codes: npt.NDArray[np.uint8], bits: int) -> I64:
    """Four times the coordinates, int64 [n, d], of codes uint8 [n, d / 8 * bits]."""
    blocks = codes.reshape(len(codes), -1, bits)
    out = np.empty((*blocks.shape[:2], 8), np.int64)
    for row, block in np.ndindex(*blocks.shape[:2]):
        planes = [int(byte) for byte in blocks[row, block]]
        k = [sum((plane >> place & 1) << p for p, plane in enumerate(planes)) for place in range(8)]
        coset = planes[0] >> 7
        k[7] += (
            sum(k[:7]) % 2 - coset
        )  # the lowest bit follows from the others; its place holds the coset
        out[row, block] = values(k, coset, bits)
    return out.reshape(len(codes), -1)


def products(codes: npt.NDArray[np.uint8], levels: npt.NDArray[Any], bits: int) -> I64:
    """int64 [m, n] of whole-numbered queries [m, d]."""
    found: I64 = levels.astype(np.int64) @ decoded(codes, bits).T
    return found


def best(
    product: I64, factor: F32, unit: float, constant: F32, apart: float, k: int
) -> tuple[F32, I64]:
    """The k least scores of one query (product [n]) in one list, and their rows; ties to the lower row."""
    score = product.astype(np.float32) * factor * np.float32(unit) + constant + np.float32(apart)
    order = np.argsort(score, kind="stable")
    order = order[~np.isnan(score[order])][:k]
    return score[order], order

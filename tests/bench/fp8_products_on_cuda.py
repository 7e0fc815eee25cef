"""How fast the card multiplies what a step multiplies: the four products of a Qwen2.5-7B block in fp8, one way a column.

TFLOP/s by CUDA events over ten calls, inputs random and in turn from three sets. *vllm*: the product that vLLM takes (CUTLASS, a
scale a token); *tensor* and *row*: torch's own with one scale a tensor and one a row and column; *bf16*: torch, plain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SHAPES = {"qkv": (3584, 4608), "out": (3584, 3584), "up": (3584, 37_888), "down": (18_944, 3584)}
ROWS = (1024, 2624, 5248)
SETS, CALLS = 3, 10


def measure(rows: tuple[int, ...] = ROWS) -> list[dict[str, Any]]:
    import torch
    from vllm import _custom_ops as ops

    fp8, told = torch.float8_e4m3fn, []
    for name, (inner, outer) in SHAPES.items():
        for count in rows:
            sets = []
            for _ in range(SETS):
                left = torch.randn(count, inner, device="cuda", dtype=torch.bfloat16)
                right = torch.randn(outer, inner, device="cuda", dtype=torch.bfloat16)
                sets.append((left, right, left.to(fp8), right.to(fp8)))
            one = torch.ones(1, device="cuda")
            of_rows = torch.ones(count, 1, device="cuda")
            of_columns = torch.ones(1, outer, device="cuda")
            ways: dict[str, Callable[[int], Any]] = {
                "vllm": lambda i, s=sets, r=of_rows, o=one: ops.cutlass_scaled_mm(
                    s[i][2], s[i][3].t(), r, o, torch.bfloat16
                ),
                "tensor": lambda i, s=sets, o=one: torch._scaled_mm(
                    s[i][2], s[i][3].t(), scale_a=o, scale_b=o, out_dtype=torch.bfloat16
                ),
                "row": lambda i, s=sets, r=of_rows, c=of_columns: torch._scaled_mm(
                    s[i][2], s[i][3].t(), scale_a=r, scale_b=c, out_dtype=torch.bfloat16
                ),
                "bf16": lambda i, s=sets: s[i][0] @ s[i][1].t(),
            }
            row: dict[str, Any] = {"product": name, "rows": count}
            for way, call in ways.items():
                try:
                    row[way] = round(2e-12 * count * inner * outer / _seconds(torch, call))
                except (RuntimeError, ValueError, TypeError) as fault:
                    row[way] = str(fault)[:120]
            told.append(row)
            del sets
    torch.cuda.empty_cache()
    return told


def _seconds(torch: Any, call: Callable[[int], Any]) -> float:
    for turn in range(SETS):
        call(turn)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for turn in range(CALLS):
        call(turn % SETS)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / CALLS

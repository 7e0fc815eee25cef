"""Build the packed ONNX trunk of a Llama model: token ids in, hidden states of every layer out, no padding.

Inputs ids[T], seg[T], pos[T]: sequences lie end to end, `seg` tells them apart, `pos` restarts at 0; the
mask (same segment, not later) is made inside the graph. Outputs hidden_0 (embedding) to hidden_L (block L,
before the final norm), each [T, dim]. The mask is O(T^2), so a step stays at T <= 2048. The language-model
head is left out: nobody who reads hidden states pays for 49,152 logits a token.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fabric_pipelines.models.gguf_llama import Float32, GgufLlama, LlamaShape, deinterleaved
from fabric_pipelines.models.onnx_graph import GraphBuilder

CONVERTER = "gguf-llama-onnx-fp32/2"
GRAPH = "trunk"
MASKED = (
    -1e9
)  # finite, so that a row without any partner cannot become NaN; exp() of it is exactly 0


def convert(model: GgufLlama, folder: Path) -> Path:
    """Write trunk.onnx and trunk.weights into `folder`."""
    shape = model.shape
    with GraphBuilder(folder, GRAPH) as graph:
        _shared(graph, shape)
        table = graph.weight("embedding", model.tensor("token_embd.weight"))
        state = graph.add("Gather", table, "ids", output="hidden_0")
        for layer in range(shape.layers):
            state = _block(graph, model, layer, state)
        return graph.finish(
            [(name, ["T"]) for name in ("ids", "seg", "pos")],
            [(f"hidden_{layer}", ["T", shape.dim]) for layer in range(shape.layers + 1)],
            architecture="LlamaForCausalLM",
            context=shape.context,
        )


def _shared(graph: GraphBuilder, shape: LlamaShape) -> None:
    """What all blocks read: shapes, the mask [T, T], cosine and sine of the rotation [T, 1, head_dim / 2]."""
    half = shape.head_dim // 2
    group = shape.heads // shape.kv_heads
    for name, values in (
        ("per_head", [-1, shape.heads + 2 * shape.kv_heads, shape.head_dim]),
        ("qk_v", [shape.heads + shape.kv_heads, shape.kv_heads]),
        ("q_k", [shape.heads, shape.kv_heads]),
        ("halves", [half, half]),
        ("grouped_q", [shape.kv_heads, -1, shape.head_dim]),
        ("by_head", [shape.heads, -1, shape.head_dim]),
        ("flat", [-1, shape.dim]),
        ("gate_up", [shape.ffn_dim, shape.ffn_dim]),
        ("axis_0", [0]),
        ("axis_1", [1]),
    ):
        graph.constant(name, values, np.int64)
    graph.constant("two", 2.0, np.float32)
    graph.constant("eps", shape.eps, np.float32)
    graph.constant("zero", 0.0, np.float32)
    graph.constant("masked", MASKED, np.float32)
    rows = graph.add("Unsqueeze", "seg", "axis_1")
    columns = graph.add("Unsqueeze", "seg", "axis_0")
    later = graph.add(
        "GreaterOrEqual",
        graph.add("Unsqueeze", "pos", "axis_1"),
        graph.add("Unsqueeze", "pos", "axis_0"),
    )
    seen = graph.add("And", graph.add("Equal", rows, columns), later)
    mask = graph.add("Where", seen, "zero", "masked")
    # One copy of the mask per query head of a group, so that the grouped scores take it as they are.
    graph.add("Concat", *[mask] * group, axis=0, output="mask")
    angles = 1.0 / shape.rope_base ** (np.arange(half, dtype=np.float64) / half)
    graph.constant("frequencies", angles.reshape(1, half), np.float32)
    position = graph.add("Unsqueeze", graph.add("Cast", "pos", to=1), "axis_1")
    turn = graph.add("Unsqueeze", graph.add("Mul", position, "frequencies"), "axis_1")
    graph.add("Cos", turn, output="cos")
    graph.add("Sin", turn, output="sin")


def _block(graph: GraphBuilder, model: GgufLlama, layer: int, state: str) -> str:
    normed = _rms_norm(graph, f"b{layer}.attn_norm", model.block(layer, "attn_norm"), state)
    mixed = _attention(graph, model, layer, normed)
    state = graph.add("Add", state, mixed)
    normed = _rms_norm(graph, f"b{layer}.ffn_norm", model.block(layer, "ffn_norm"), state)
    return graph.add("Add", state, _ffn(graph, model, layer, normed), output=f"hidden_{layer + 1}")


def _rms_norm(graph: GraphBuilder, name: str, scale: Float32, state: str) -> str:
    """Spelt as runtimes expect it (Pow, ReduceMean, Add, Sqrt, Div, Mul), so that they fuse it."""
    mean = graph.add("ReduceMean", graph.add("Pow", state, "two"), axes=[-1], keepdims=1)
    root = graph.add("Sqrt", graph.add("Add", mean, "eps"))
    return graph.add("Mul", graph.add("Div", state, root), graph.weight(name, scale))


def _attention(graph: GraphBuilder, model: GgufLlama, layer: int, normed: str) -> str:
    shape = model.shape
    # The softmax scale goes into q: 1/sqrt(64) is a power of two, so no bit is lost.
    q = deinterleaved(model.block(layer, "attn_q"), shape.heads) / np.sqrt(
        np.float32(shape.head_dim)
    )
    k = deinterleaved(model.block(layer, "attn_k"), shape.kv_heads)
    fused = np.concatenate([q, k, model.block(layer, "attn_v")]).T
    projected = graph.add("MatMul", normed, graph.weight(f"b{layer}.qkv", fused))
    heads = graph.add("Reshape", projected, "per_head")
    turning, v = graph.split("Split", heads, "qk_v", outputs=(None, None), axis=1)
    q_, k_ = graph.split("Split", _rotate(graph, turning), "q_k", outputs=(None, None), axis=1)
    # [T, heads, d] -> [heads, T, d] -> [kv_heads, group * T, d]: query heads of a group share their k and v.
    queries = graph.add("Reshape", graph.add("Transpose", q_, perm=[1, 0, 2]), "grouped_q")
    keys = graph.add("Transpose", k_, perm=[1, 2, 0])
    values = graph.add("Transpose", v, perm=[1, 0, 2])
    scores = graph.add("Add", graph.add("MatMul", queries, keys), "mask")
    mixed = graph.add("MatMul", graph.add("Softmax", scores, axis=-1), values)
    by_head = graph.add("Reshape", mixed, "by_head")
    flat = graph.add("Reshape", graph.add("Transpose", by_head, perm=[1, 0, 2]), "flat")
    out = graph.weight(f"b{layer}.out", model.block(layer, "attn_output").T)
    return graph.add("MatMul", flat, out)


def _rotate(graph: GraphBuilder, heads: str) -> str:
    """Rotary position embedding (Su et al. 2021) on [T, heads, d] in half order."""
    first, second = graph.split("Split", heads, "halves", outputs=(None, None), axis=2)
    left = graph.add("Sub", graph.add("Mul", first, "cos"), graph.add("Mul", second, "sin"))
    right = graph.add("Add", graph.add("Mul", second, "cos"), graph.add("Mul", first, "sin"))
    return graph.add("Concat", left, right, axis=2)


def _ffn(graph: GraphBuilder, model: GgufLlama, layer: int, normed: str) -> str:
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x)), gate and up in one product."""
    fused = np.concatenate([model.block(layer, "ffn_gate"), model.block(layer, "ffn_up")]).T
    both = graph.add("MatMul", normed, graph.weight(f"b{layer}.gate_up", fused))
    gate, up = graph.split("Split", both, "gate_up", outputs=(None, None), axis=1)
    active = graph.add("Mul", graph.add("Mul", gate, graph.add("Sigmoid", gate)), up)
    down = graph.weight(f"b{layer}.down", model.block(layer, "ffn_down").T)
    return graph.add("MatMul", active, down)

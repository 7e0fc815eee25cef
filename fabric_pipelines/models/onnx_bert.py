"""Build the ONNX encoder of a BERT model (MiniLM): token ids in, last hidden states out.

Inputs ids[B, L], seg[B, L], pos[B, L]: every row holds one or more sequences end to end, told apart by
`seg`, `pos` restarting at 0; a token sees its own segment only. One row is a packed step, many rows of one
sequence each are a shape-pure batch without the O(T^2) mask. Output tokens[B, L, dim]; pooling is not
here, since it is a sum over segments that costs nothing outside.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fabric_pipelines.errors import MissingDependency, VersionRefused
from fabric_pipelines.models.onnx_graph import GraphBuilder

CONVERTER = "safetensors-bert-onnx-fp32/2"
GRAPH = "trunk"
MASKED = -1e9
Weights = Callable[[str], npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class BertShape:
    layers: int
    dim: int
    ffn_dim: int
    heads: int
    vocab_size: int
    context: int
    eps: float

    @classmethod
    def from_config(cls, path: Path) -> BertShape:
        config = json.loads(path.read_text())
        kind = (config["model_type"], config["hidden_act"], config["position_embedding_type"])
        if kind != ("bert", "gelu", "absolute"):
            raise VersionRefused(
                f"{path.name} describes {kind}, not BERT with gelu and absolute positions"
            )
        return cls(
            layers=config["num_hidden_layers"],
            dim=config["hidden_size"],
            ffn_dim=config["intermediate_size"],
            heads=config["num_attention_heads"],
            vocab_size=config["vocab_size"],
            context=config["max_position_embeddings"],
            eps=config["layer_norm_eps"],
        )

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def convert(weights: Path, shape: BertShape, folder: Path) -> Path:
    """Write trunk.onnx and trunk.weights into `folder`."""
    try:
        from safetensors import safe_open
    except ImportError:
        raise MissingDependency(
            "safetensors", "embedded", "converting an embedding model"
        ) from None
    with safe_open(weights, framework="numpy") as tensors, GraphBuilder(folder, GRAPH) as graph:
        get = tensors.get_tensor
        _shared(graph, shape)
        state = _embeddings(graph, get, shape)
        for layer in range(shape.layers):
            state = _block(graph, get, shape, layer, state)
        graph.add("Identity", state, output="tokens")
        return graph.finish(
            [(name, ["B", "L"]) for name in ("ids", "seg", "pos")],
            [("tokens", ["B", "L", shape.dim])],
            architecture="BertModel",
            context=shape.context,
        )


def _shared(graph: GraphBuilder, shape: BertShape) -> None:
    for name, values in (
        ("per_head", [0, 0, 3 * shape.heads, shape.head_dim]),
        ("flat", [0, 0, shape.dim]),
        ("axes_rows", [1, 3]),
        ("axes_columns", [1, 2]),
        ("q_k_v", [shape.heads] * 3),
    ):
        graph.constant(name, values, np.int64)
    graph.constant("zero", 0.0, np.float32)
    graph.constant("one", 1.0, np.float32)
    graph.constant("half", 0.5, np.float32)
    graph.constant("root_2", np.sqrt(2.0), np.float32)
    graph.constant("masked", MASKED, np.float32)
    same = graph.add(
        "Equal",
        graph.add("Unsqueeze", "seg", "axes_rows"),
        graph.add("Unsqueeze", "seg", "axes_columns"),
    )
    graph.add("Where", same, "zero", "masked", output="mask")


def _embeddings(graph: GraphBuilder, get: Weights, shape: BertShape) -> str:
    word = graph.weight("words", get("embeddings.word_embeddings.weight"))
    # All tokens are of type 0 here, so that its row can be part of the position table.
    kind = get("embeddings.token_type_embeddings.weight")[0]
    place = graph.weight("places", get("embeddings.position_embeddings.weight") + kind)
    both = graph.add("Add", graph.add("Gather", word, "ids"), graph.add("Gather", place, "pos"))
    return _layer_norm(graph, get, "embeddings.LayerNorm", shape.eps, both)


def _layer_norm(graph: GraphBuilder, get: Weights, name: str, eps: float, state: str) -> str:
    scale = graph.weight(f"{name}.scale", get(f"{name}.weight"))
    shift = graph.weight(f"{name}.shift", get(f"{name}.bias"))
    return graph.add("LayerNormalization", state, scale, shift, axis=-1, epsilon=eps)


def _linear(graph: GraphBuilder, get: Weights, name: str, state: str) -> str:
    product = graph.add("MatMul", state, graph.weight(f"{name}.w", get(f"{name}.weight").T))
    return graph.add("Add", product, graph.weight(f"{name}.b", get(f"{name}.bias")))


def _block(graph: GraphBuilder, get: Weights, shape: BertShape, layer: int, state: str) -> str:
    """Post-norm encoder block (Devlin et al. 2019)."""
    name = f"encoder.layer.{layer}"
    mixed = _attention(graph, get, shape, f"{name}.attention", state)
    state = _layer_norm(
        graph, get, f"{name}.attention.output.LayerNorm", shape.eps, graph.add("Add", mixed, state)
    )
    wide = _gelu(graph, _linear(graph, get, f"{name}.intermediate.dense", state))
    narrow = _linear(graph, get, f"{name}.output.dense", wide)
    return _layer_norm(
        graph, get, f"{name}.output.LayerNorm", shape.eps, graph.add("Add", narrow, state)
    )


def _gelu(graph: GraphBuilder, state: str) -> str:
    """The exact one, x/2 (1 + erf(x / sqrt 2)), spelt as runtimes expect it for fusion."""
    bell = graph.add("Erf", graph.add("Div", state, "root_2"))
    return graph.add("Mul", graph.add("Mul", state, graph.add("Add", bell, "one")), "half")


def _attention(graph: GraphBuilder, get: Weights, shape: BertShape, name: str, state: str) -> str:
    scale = np.float32(1.0 / np.sqrt(shape.head_dim))
    parts = [f"{name}.self.{part}" for part in ("query", "key", "value")]
    scales = (scale, np.float32(1), np.float32(1))  # the softmax scale goes into q
    weight = np.concatenate(
        [get(f"{part}.weight") * by for part, by in zip(parts, scales, strict=True)]
    ).T
    bias = np.concatenate(
        [get(f"{part}.bias") * by for part, by in zip(parts, scales, strict=True)]
    )
    projected = graph.add(
        "Add",
        graph.add("MatMul", state, graph.weight(f"{name}.qkv.w", weight)),
        graph.weight(f"{name}.qkv.b", bias),
    )
    heads = graph.add("Reshape", projected, "per_head")
    q, k, v = graph.split("Split", heads, "q_k_v", outputs=(None, None, None), axis=2)
    queries = graph.add("Transpose", q, perm=[0, 2, 1, 3])
    keys = graph.add("Transpose", k, perm=[0, 2, 3, 1])
    values = graph.add("Transpose", v, perm=[0, 2, 1, 3])
    scores = graph.add("Add", graph.add("MatMul", queries, keys), "mask")
    mixed = graph.add("MatMul", graph.add("Softmax", scores, axis=-1), values)
    flat = graph.add("Reshape", graph.add("Transpose", mixed, perm=[0, 2, 1, 3]), "flat")
    return _linear(graph, get, f"{name}.output.dense", flat)

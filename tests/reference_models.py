"""Plain references of the two architectures in NumPy float64, one sequence at a time, from the papers.

Nothing is shared with the graphs under test: no packing, no fused weights, rotation by pairs as the GGUF
stores them (Touvron et al. 2023, Su et al. 2021, Shazeer 2020; Devlin et al. 2019).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import load_file
from scipy.special import erf

Array = np.ndarray


def softmax(scores: Array) -> Array:
    shifted = np.exp(scores - scores.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


class ReferenceLlama:
    """hidden(ids) gives the residual stream [layers + 1, T, dim]; logits(hidden[-1]) the head's output."""

    def __init__(self, path: Path) -> None:
        reader = GGUFReader(path)
        field = {
            name: value.contents() for name, value in reader.fields.items() if "llama." in name
        }
        self._quantised = {tensor.name: tensor for tensor in reader.tensors}
        self.layers = field["llama.block_count"]
        self.heads = field["llama.attention.head_count"]
        self.kv_heads = field["llama.attention.head_count_kv"]
        self.base = field["llama.rope.freq_base"]
        self.eps = field["llama.attention.layer_norm_rms_epsilon"]

    def weight(self, name: str) -> Array:
        tensor = self._quantised[f"{name}.weight"]
        return dequantize(tensor.data, tensor.tensor_type).astype(np.float64)

    def norm(self, x: Array, name: str) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * self.weight(name)

    def rotate(self, head: Array) -> Array:
        """[T, d]: the pair (2i, 2i + 1) of token t turns by t / base^(2i / d)."""
        steps, d = head.shape
        angle = np.outer(np.arange(steps), self.base ** (-np.arange(0, d, 2) / d))
        pairs = (head[:, 0::2] + 1j * head[:, 1::2]) * np.exp(1j * angle)
        turned = np.empty_like(head)
        turned[:, 0::2], turned[:, 1::2] = pairs.real, pairs.imag
        return turned

    def attention(self, x: Array, layer: int) -> Array:
        steps, dim = x.shape
        d = dim // self.heads
        q, k, v = (x @ self.weight(f"blk.{layer}.attn_{part}").T for part in "qkv")
        earlier = np.tril(np.ones((steps, steps), bool))
        mixed = np.empty((steps, dim))
        for head in range(self.heads):
            pair = head // (self.heads // self.kv_heads)
            mine, theirs = slice(head * d, (head + 1) * d), slice(pair * d, (pair + 1) * d)
            scores = self.rotate(q[:, mine]) @ self.rotate(k[:, theirs]).T / math.sqrt(d)
            mixed[:, mine] = softmax(np.where(earlier, scores, -np.inf)) @ v[:, theirs]
        return mixed @ self.weight(f"blk.{layer}.attn_output").T

    def feed_forward(self, x: Array, layer: int) -> Array:
        gate = x @ self.weight(f"blk.{layer}.ffn_gate").T
        up = x @ self.weight(f"blk.{layer}.ffn_up").T
        return (gate / (1 + np.exp(-gate)) * up) @ self.weight(f"blk.{layer}.ffn_down").T

    def hidden(self, ids: Sequence[int]) -> Array:
        x = self.weight("token_embd")[list(ids)]
        states = [x]
        for layer in range(self.layers):
            x = x + self.attention(self.norm(x, f"blk.{layer}.attn_norm"), layer)
            x = x + self.feed_forward(self.norm(x, f"blk.{layer}.ffn_norm"), layer)
            states.append(x)
        return np.stack(states)

    def logits(self, last: Array) -> Array:
        """From the last layer's states [T, dim]: [T, vocab], the head being the embedding (tied)."""
        return self.norm(last, "output_norm") @ self.weight("token_embd").T


class ReferenceBert:
    """hidden(ids) gives the last hidden states [T, dim]; embedding(ids) their normalised mean [dim]."""

    def __init__(self, path: Path, heads: int, eps: float = 1e-12) -> None:
        self.weights = {name: value.astype(np.float64) for name, value in load_file(path).items()}
        self.heads, self.eps = heads, eps
        self.layers = 1 + max(
            int(name.split(".")[2]) for name in self.weights if name.startswith("encoder.layer.")
        )

    def linear(self, x: Array, name: str) -> Array:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def norm(self, x: Array, name: str) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        spread = np.sqrt((centred**2).mean(-1, keepdims=True) + self.eps)
        return centred / spread * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def hidden(self, ids: Sequence[int]) -> Array:
        x = (
            self.weights["embeddings.word_embeddings.weight"][list(ids)]
            + self.weights["embeddings.position_embeddings.weight"][: len(ids)]
            + self.weights["embeddings.token_type_embeddings.weight"][0]
        )
        x = self.norm(x, "embeddings.LayerNorm")
        for layer in range(self.layers):
            name = f"encoder.layer.{layer}"
            mixed = self.attention(x, f"{name}.attention.self")
            mixed = self.linear(mixed, f"{name}.attention.output.dense")
            x = self.norm(x + mixed, f"{name}.attention.output.LayerNorm")
            wide = gelu(self.linear(x, f"{name}.intermediate.dense"))
            x = self.norm(x + self.linear(wide, f"{name}.output.dense"), f"{name}.output.LayerNorm")
        return x

    def attention(self, x: Array, name: str) -> Array:
        q, k, v = (self.linear(x, f"{name}.{part}") for part in ("query", "key", "value"))
        d = x.shape[1] // self.heads
        heads = [slice(head * d, (head + 1) * d) for head in range(self.heads)]
        return np.concatenate(
            [softmax(q[:, h] @ k[:, h].T / math.sqrt(d)) @ v[:, h] for h in heads], axis=1
        )

    def embedding(self, ids: Sequence[int]) -> Array:
        mean = self.hidden(ids).mean(0)
        return mean / np.linalg.norm(mean)


def gelu(x: Array) -> Array:
    return x / 2 * (1 + erf(x / math.sqrt(2)))


def relative_error(found: Array, truth: Array) -> float:
    """Largest difference over largest magnitude."""
    return float(np.abs(np.asarray(found, np.float64) - truth).max() / np.abs(truth).max())

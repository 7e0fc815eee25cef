"""Two small models with random weights, made in a second: the whole path from file to engine runs on them
without a download. Same formats and code as the real ones, other sizes."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pyarrow as pa
import pytest
import tokenizers
from safetensors.numpy import save_file

from fabric_pipelines.models.catalogue import MINILM, SMOLLM2, ModelSpec, SourceFile
from fabric_pipelines.models.gguf_llama import GgufLlama, deinterleaved
from fabric_pipelines.models.sources import sha256_file
from fabric_pipelines.records.lease import LEASE_SCHEMA, Lease
from fabric_pipelines.worker.engines.door import Engine

LAYERS, DIM, FFN, HEADS, KV_HEADS, CONTEXT = 3, 64, 96, 4, 2, 4096
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello"]
ALPHABET = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*SPECIAL, *ALPHABET, *(merge.replace(" ", "") for merge in MERGES)]
BERT_LAYERS, BERT_HEADS, BERT_CONTEXT = 2, 4, 512
WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "hello",
    "world",
    "a",
    "b",
    "##s",
    ".",
    "[",
    "]",
    "sep",
]


def write_llama(folder: Path) -> ModelSpec:
    """A tiny Llama GGUF in `folder`, and a spec that accepts exactly it."""
    path = folder / "tiny.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(DIM)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    draw = np.random.default_rng(1)
    kv = DIM * KV_HEADS // HEADS

    def put(name: str, *shape: int, around: float = 0.0) -> None:
        values = around + draw.normal(0, 0.3 / np.sqrt(shape[-1]) * 4, shape)
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))

    put("token_embd", len(TOKENS), DIM)
    put("output_norm", DIM, around=1.0)
    for layer in range(LAYERS):
        put(f"blk.{layer}.attn_norm", DIM, around=1.0)
        put(f"blk.{layer}.ffn_norm", DIM, around=1.0)
        put(f"blk.{layer}.attn_q", DIM, DIM)
        put(f"blk.{layer}.attn_k", kv, DIM)
        put(f"blk.{layer}.attn_v", kv, DIM)
        put(f"blk.{layer}.attn_output", DIM, DIM)
        put(f"blk.{layer}.ffn_gate", FFN, DIM)
        put(f"blk.{layer}.ffn_up", FFN, DIM)
        put(f"blk.{layer}.ffn_down", DIM, FFN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return _spec(SMOLLM2, "tiny-llama", [path])


def write_llama_checkpoint(gguf_path: Path, folder: Path) -> None:
    """The model of `write_llama` as a Hugging Face checkpoint: same weights, its own names and layout."""
    model = GgufLlama(gguf_path)
    shape = model.shape
    weights = {
        "model.embed_tokens.weight": model.tensor("token_embd.weight"),
        "model.norm.weight": model.tensor("output_norm.weight"),
    }
    turned = {"attn_q": shape.heads, "attn_k": shape.kv_heads}
    names = {
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
    for layer in range(shape.layers):
        for ours, theirs in names.items():
            values = model.block(layer, ours)
            values = deinterleaved(values, turned[ours]) if ours in turned else values
            weights[f"model.layers.{layer}.{theirs}.weight"] = np.ascontiguousarray(values)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": DIM,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": len(TOKENS),
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))


def write_bert(folder: Path) -> ModelSpec:
    """A tiny BERT (safetensors, tokenizer.json, config.json) in `folder`, and a spec that accepts it."""
    draw = np.random.default_rng(2)
    weights: dict[str, np.ndarray] = {}

    def put(name: str, *shape: int, around: float = 0.0) -> None:
        weights[name] = (around + draw.normal(0, 0.5 / np.sqrt(shape[-1]), shape)).astype(
            np.float32
        )

    def norm(name: str) -> None:
        put(f"{name}.weight", DIM, around=1.0)
        put(f"{name}.bias", DIM)

    def linear(name: str, rows: int, columns: int) -> None:
        put(f"{name}.weight", rows, columns)
        put(f"{name}.bias", rows)

    put("embeddings.word_embeddings.weight", len(WORDS), DIM)
    put("embeddings.position_embeddings.weight", BERT_CONTEXT, DIM)
    put("embeddings.token_type_embeddings.weight", 2, DIM)
    norm("embeddings.LayerNorm")
    for layer in range(BERT_LAYERS):
        name = f"encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            linear(f"{name}.attention.self.{part}", DIM, DIM)
        linear(f"{name}.attention.output.dense", DIM, DIM)
        norm(f"{name}.attention.output.LayerNorm")
        linear(f"{name}.intermediate.dense", FFN, DIM)
        linear(f"{name}.output.dense", DIM, FFN)
        norm(f"{name}.output.LayerNorm")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    raw = tokenizers.BertWordPieceTokenizer({word: i for i, word in enumerate(WORDS)})
    raw.enable_truncation(4)  # a file may bring its own cut and padding; ours must ignore both
    raw.enable_padding(length=4)
    raw.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "num_hidden_layers": BERT_LAYERS,
        "hidden_size": DIM,
        "intermediate_size": FFN,
        "num_attention_heads": BERT_HEADS,
        "vocab_size": len(WORDS),
        "max_position_embeddings": BERT_CONTEXT,
        "layer_norm_eps": 1e-12,
    }
    (folder / "config.json").write_text(json.dumps(config))
    names = ("model.safetensors", "tokenizer.json", "config.json")
    return _spec(MINILM, "tiny-bert", [folder / name for name in names])


def _spec(like: ModelSpec, name: str, paths: list[Path]) -> ModelSpec:
    files = tuple(SourceFile(p.name, sha256_file(p), p.stat().st_size) for p in paths)
    return replace(like, name=name, files=files, source="pypi:tiny==1", wheel_sha256="0" * 64)


def lease_of(
    tokens: list[list[int]],
    sampling: dict[str, object],
    *,
    engine: str = "tiny",
    new: int | list[int] = 0,
    first_id: int = 0,
) -> Lease:
    """A lease over `tokens`; task id i + first_id, source row 1,000 + task id."""
    count = len(tokens)
    ids = range(first_id, first_id + count)
    columns = {
        "task_id": list(ids),
        "tokens": tokens,
        "max_new_tokens": [new] * count if isinstance(new, int) else new,
        "source_row": [1000 + task for task in ids],
        "metadata": [b"m%d" % task for task in ids],
        "attempts": [1] * count,
        "leader": [True] * count,
    }
    arrays = [pa.array(columns[field.name], field.type) for field in LEASE_SCHEMA]
    batch = pa.RecordBatch.from_arrays(arrays, schema=LEASE_SCHEMA)
    return Lease(1, "lane", engine, sampling, 0, 0, batch)


def polled_until_it_fails(
    engine: Engine, rows: dict[int, dict[str, Any]], *, within_s: float = 60.0, wait_s: float = 1.0
) -> None:
    """Poll an engine that must fail; what came before stands in `rows`. The failure leaves this function; an
    engine that ends all it holds instead, or does nothing at all, fails the test and says which."""
    end = time.monotonic() + within_s
    while engine.unfinished():
        if time.monotonic() >= end:
            pytest.fail(f"{engine.name} neither failed nor ended {engine.unfinished()[:8]}")
        for batch in engine.poll(wait_s):
            for row in batch.to_pylist():
                assert row["task_id"] not in rows, "a task came back twice"
                rows[row["task_id"]] = row
    pytest.fail(f"{engine.name} ended all {len(rows)} tasks without failing")


def drain(engine: Engine, *, within_s: float = 60.0) -> dict[int, dict[str, Any]]:
    """Poll until nothing is unfinished; completion rows by task id. Fails after `within_s`."""
    rows: dict[int, dict[str, Any]] = {}
    end = time.monotonic() + within_s
    while engine.unfinished():
        assert time.monotonic() < end, f"{engine.name} still holds {engine.unfinished()}"
        for batch in engine.poll(1.0):
            for row in batch.to_pylist():
                assert row["task_id"] not in rows, "a task came back twice"
                rows[row["task_id"]] = row
    return rows

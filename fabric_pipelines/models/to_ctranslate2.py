"""Convert a Llama GGUF into a CTranslate2 model folder with int8 weights; numpy only.

Every layer is quantised as soon as it is read, so the peak is the int8 model and one fp32 layer (the stock
converters hold the whole fp32 model first). q and k keep GGUF's pair order: CTranslate2 rotates
interleaved pairs when told so, which saves a permutation here.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fabric_pipelines.errors import MissingDependency
from fabric_pipelines.models.gguf_llama import GgufLlama

CONVERTER = "gguf-llama-ctranslate2-int8/1"
PRECISION = "int8_float32"


def convert(model: GgufLlama, folder: Path) -> None:
    """Write model.bin, config.json and vocabulary.json into `folder`."""
    try:
        from ctranslate2.specs import Activation, TransformerDecoderModelSpec
    except ImportError:
        raise MissingDependency(
            "ctranslate2", "embedded", "converting a generation model"
        ) from None
    shape = model.shape
    spec = TransformerDecoderModelSpec.from_config(
        shape.layers,
        shape.heads,
        activation=Activation.SWISH,
        pre_norm=True,
        ffn_glu=True,
        rms_norm=True,
        rotary_dim=shape.head_dim,
        rotary_interleave=True,
        rotary_base=shape.rope_base,
        num_heads_kv=None if shape.kv_heads == shape.heads else shape.kv_heads,
    )
    decoder = spec.decoder
    decoder.scale_embeddings = False
    decoder.embeddings.weight = model.tensor("token_embd.weight")
    _seal(decoder.embeddings)
    decoder.layer_norm.gamma = model.tensor("output_norm.weight")
    # The output projection is the embedding (tied): the same array object becomes an alias on disk.
    decoder.projection.weight = decoder.embeddings.weight.array
    decoder.projection.weight_scale = decoder.embeddings.weight_scale.array
    for index, layer in enumerate(decoder.layer):
        attention, feed = layer.self_attention, layer.ffn
        attention.layer_norm.gamma = model.block(index, "attn_norm")
        attention.linear[0].weight = np.concatenate(
            [model.block(index, part) for part in ("attn_q", "attn_k", "attn_v")]
        )
        attention.linear[1].weight = model.block(index, "attn_output")
        feed.layer_norm.gamma = model.block(index, "ffn_norm")
        feed.linear_0.weight = model.block(index, "ffn_gate")
        feed.linear_0_noact.weight = model.block(index, "ffn_up")
        feed.linear_1.weight = model.block(index, "ffn_down")
        _seal(layer)
    spec.register_vocabulary(model.tokens)
    tokens = model.tokens
    spec.config.bos_token = tokens[model.field("tokenizer.ggml.bos_token_id")]
    spec.config.eos_token = tokens[model.field("tokenizer.ggml.eos_token_id")]
    spec.config.unk_token = tokens[model.field("tokenizer.ggml.unknown_token_id")]
    spec.config.layer_norm_epsilon = shape.eps
    spec.validate()
    spec.optimize(None)  # quantised already: only makes the alias of embedding and projection
    spec.save(str(folder))


def _seal(layer: object) -> None:
    """Quantise one layer now: its fp32 arrays become garbage. Not the public `optimize`, since that also makes
    aliases, whose names are only right when it walks from the top."""
    layer.validate()  # type: ignore[attr-defined]
    layer._quantize(PRECISION)  # type: ignore[attr-defined]

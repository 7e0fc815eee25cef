"""Tokeniser: text to token ids in bulk, and back; identified by the sha256 of its file.

Text is text: a special token spelled inside a prompt is encoded as plain characters, so that nobody can
write himself another role. Only `encode_chat` puts control tokens, by id. Nothing is truncated unless the
caller says where.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fabric_pipelines.errors import MissingDependency, UsageError
from fabric_pipelines.models.gguf_llama import GgufLlama

FILE = "tokenizer.json"
SETTINGS_FILE = "tokeniser.json"
SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
CONVERTER = "tokeniser/1"


class Tokeniser:
    """vocab_size: ids are below it; eos_id: ends a generation (or a sequence, for BERT); sha256: of the file;
    adds_special_tokens: whether `encode` frames each text ([CLS] ... [SEP])."""

    def __init__(self, folder: Path) -> None:
        library = _library("tokenising text")
        content = (folder / FILE).read_bytes()
        settings = json.loads((folder / SETTINGS_FILE).read_text())
        self._raw = library.Tokenizer.from_str(content.decode())
        self._raw.no_padding()
        self._raw.no_truncation()
        self._raw.encode_special_tokens = True
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.vocab_size: int = settings["vocab_size"]
        self.eos_id: int = settings["eos_id"]
        self.chat_start_id: int | None = settings["chat_start_id"]
        self.adds_special_tokens: bool = settings["adds_special_tokens"]

    def encode(self, texts: Sequence[str], *, tokens_max: int | None = None) -> list[list[int]]:
        """Ids of each text, computed outside the interpreter lock. With `tokens_max` longer texts are cut at
        the right, framing tokens kept."""
        if tokens_max is None:
            return [encoding.ids for encoding in self._raw.encode_batch_fast(list(texts))]
        self._raw.enable_truncation(tokens_max)
        try:
            return [encoding.ids for encoding in self._raw.encode_batch_fast(list(texts))]
        finally:
            self._raw.no_truncation()

    def encode_chat(
        self, prompts: Sequence[str], *, system: str | None = SYSTEM_PROMPT
    ) -> list[list[int]]:
        """Ids of one-turn conversations, ending where the assistant's answer starts (the template of
        SmolLM2-Instruct). `system` None leaves the system turn out."""
        start, end = self.chat_start_id, self.eos_id
        if start is None:
            raise UsageError("this model has no chat template; use encode")
        fixed = [] if system is None else [f"system\n{system}"]
        pieces = self.encode([*fixed, "\n", "assistant\n", *[f"user\n{text}" for text in prompts]])
        newline, assistant, *users = pieces[len(fixed) :]
        head = [start, *pieces[0], end, *newline] if fixed else []
        tail = [end, *newline, start, *assistant]
        return [[*head, start, *user, *tail] for user in users]

    def decode(self, ids: Iterable[Sequence[int]]) -> list[str]:
        """Text of each row of ids, control tokens left out."""
        rows = [list(row) for row in ids]
        texts: list[str] = self._raw.decode_batch(rows, skip_special_tokens=True)
        return texts


def from_gguf(model: GgufLlama, folder: Path) -> None:
    """Rebuild the byte-level BPE tokeniser of SmolLM2 from the file's tokens and merges."""
    library = _library("building the tokeniser")
    if (model.field("tokenizer.ggml.model"), model.field("tokenizer.ggml.pre")) != (
        "gpt2",
        "smollm",
    ):
        raise UsageError("only byte-level BPE with the 'smollm' pre-tokeniser is known")
    tokens = model.tokens
    vocabulary = {token: index for index, token in enumerate(tokens)}
    raw = library.Tokenizer(library.models.BPE(vocab=vocabulary, merges=model.merges))
    raw.pre_tokenizer = library.pre_tokenizers.Sequence(
        [
            library.pre_tokenizers.Digits(individual_digits=True),
            library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    raw.decoder = library.decoders.ByteLevel()
    raw.add_special_tokens([tokens[index] for index in model.control_ids])
    (folder / FILE).write_text(raw.to_str())
    _write_settings(
        folder,
        vocab_size=len(tokens),
        eos_id=model.field("tokenizer.ggml.eos_token_id"),
        chat_start_id=model.field("tokenizer.ggml.bos_token_id"),
        adds_special_tokens=False,
    )


def from_wordpiece(source: Path, folder: Path, vocab_size: int) -> None:
    """Take over a BERT tokenizer.json as it is; its own padding and truncation are switched off on loading."""
    content = source.read_bytes()
    raw = _library("reading the tokeniser").Tokenizer.from_str(content.decode())
    (folder / FILE).write_bytes(content)
    _write_settings(
        folder,
        vocab_size=vocab_size,
        eos_id=raw.token_to_id("[SEP]"),
        chat_start_id=None,
        adds_special_tokens=True,
    )


def _write_settings(folder: Path, **settings: int | bool | None) -> None:
    (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def _library(why: str) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise MissingDependency("tokenizers", "embedded", why) from None
    return tokenizers

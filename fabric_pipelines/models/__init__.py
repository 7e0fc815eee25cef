"""Models: pulled from pinned sources, proven by digest, converted once, opened offline.

pull(name, cache)       download, verify, convert; idempotent
located(name, cache)    folders of a pulled model
tokeniser(name, cache)  text to token ids and back
installed, verify, prune: what the cache holds
"""

from fabric_pipelines.models.cache import (
    Installed,
    ModelFiles,
    contents,
    installed,
    located,
    part_folder,
    part_mark,
    prune,
    pull,
    require_whole,
    tokeniser,
    verify,
)
from fabric_pipelines.models.catalogue import MODELS, ModelSpec, SourceFile
from fabric_pipelines.models.tokenisation import Tokeniser

__all__ = [
    "MODELS",
    "Installed",
    "ModelFiles",
    "ModelSpec",
    "SourceFile",
    "Tokeniser",
    "contents",
    "installed",
    "located",
    "part_folder",
    "part_mark",
    "prune",
    "pull",
    "require_whole",
    "tokeniser",
    "verify",
]

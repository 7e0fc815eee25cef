"""Models: pulled from pinned sources, proven by digest, converted once, opened offline.

pull(name, cache)       download, verify, convert; idempotent
located(name, cache)    folders of a pulled model
tokeniser(name, cache)  text to token ids and back
installed               what the cache holds
pulled, verify, outdated, prune: is it still what was pulled, and what nobody opens any more
"""

from fabric_pipelines.models.cache import (
    Installed,
    ModelFiles,
    installed,
    located,
    part_folder,
    part_mark,
    pull,
    require_whole,
    tokeniser,
)
from fabric_pipelines.models.catalogue import MODELS, ModelSpec, SourceFile
from fabric_pipelines.models.description import contents, require_facts
from fabric_pipelines.models.tokenisation import Tokeniser
from fabric_pipelines.models.upkeep import Verified, outdated, prune, pulled, verify

__all__ = [
    "MODELS",
    "Installed",
    "ModelFiles",
    "ModelSpec",
    "SourceFile",
    "Tokeniser",
    "Verified",
    "contents",
    "installed",
    "located",
    "outdated",
    "part_folder",
    "part_mark",
    "prune",
    "pull",
    "pulled",
    "require_facts",
    "require_whole",
    "tokeniser",
    "verify",
]

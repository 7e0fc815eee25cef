"""Profile: the four numbers a consumer declares, and nothing else.

`max_seq_len` is left out on purpose: the broker does not filter by length; the runtime fails oversized
tasks back. The engine is identity (sent in the hello), not a fifth number.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from fabric_pipelines.errors import UsageError
from fabric_pipelines.records.batch import Budget


@dataclass(frozen=True, slots=True)
class Profile:
    """max_batch_size: sequences at once; max_num_tokens: packed tokens a step; kv_cache_tokens: 0 = single
    pass; window_tokens: supply held beyond what runs."""

    max_batch_size: int
    max_num_tokens: int
    kv_cache_tokens: int
    window_tokens: int

    def __post_init__(self) -> None:
        for name, least in (
            ("max_batch_size", 1),
            ("max_num_tokens", 1),
            ("kv_cache_tokens", 0),
            ("window_tokens", 0),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise UsageError(
                    f"profile field {name} is {value!r}; it must be an integer >= {least}"
                )

    @property
    def batch(self) -> Budget:
        """What one batch for it may hold."""
        return Budget(self.max_batch_size, self.max_num_tokens, self.kv_cache_tokens or None)

    def as_json(self) -> dict[str, int]:
        return asdict(self)

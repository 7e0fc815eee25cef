"""What vLLM's own process does differently for us; imported there by name, and by nobody else.

vLLM schedules one step ahead of the card. With a thousand sequences a step that only generates takes its scheduler longer than
the card, and what it gains during a step with prompts, ten times as long, is lost: it may not run further ahead. `Ahead` lets
it, by as many steps as `additional_config` says; vLLM sizes its buffers by the same number. A sequence then takes part in as many
steps behind its last token, whose results vLLM drops as it does after a stop token.

vLLM tells each token of each sequence as it comes. `WholeAnswers` tells the first token (so that a prompt is known to have begun) and
then the end with all the others, where only the end is asked for: no object, no message and no decoding a token.
"""

from __future__ import annotations

from typing import Any

from vllm.config.vllm import VllmConfig
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

STEPS_AHEAD = "fabric_steps_ahead"  # in vLLM's additional_config


def _further(plain: property) -> property:
    def max_concurrent_batches(config: Any) -> int:
        most: int = plain.__get__(config)
        ahead: int = (config.additional_config or {}).get(STEPS_AHEAD, 1)
        return max(most, 1 + ahead) if most > 1 else most  # 1: vLLM does not run ahead at all

    return property(max_concurrent_batches)


VllmConfig.max_concurrent_batches = _further(VllmConfig.max_concurrent_batches)


class Ahead:
    """vLLM's worker inherits from it (`worker_extension_cls`), so this module is there before a buffer is sized."""


class WholeAnswers(AsyncScheduler):  # type: ignore[misc]
    """`holding` may be set while it runs: what was held goes out with the next token."""

    holding = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[str, list[int]] = {}

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        told = super().update_from_output(scheduler_output, model_runner_output)
        for message in told.values():
            message.outputs = [output for output in message.outputs if self._goes_out(output)]
        return told

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        """From outside, an abort most likely: nobody is told of what was held."""
        ended = super().finish_requests(request_ids, finished_status)
        for request_id, _ in ended:
            self._held.pop(request_id, None)
        return ended

    def _goes_out(self, output: Any) -> bool:
        held = self._held.get(output.request_id)
        if output.finish_reason is not None:
            if held is not None:
                output.new_token_ids = [*held, *output.new_token_ids]
                del self._held[output.request_id]
            return True
        if held is None:
            if self.holding and _only_its_end_is_asked_for(self.requests[output.request_id]):
                self._held[output.request_id] = []
            return True
        if self.holding:
            held.extend(output.new_token_ids)
            return False
        output.new_token_ids = [*held, *output.new_token_ids]
        held.clear()
        return True


def _only_its_end_is_asked_for(request: Any) -> bool:
    """Nothing that vLLM's other process decides hangs on single tokens: no stop strings, no log probabilities, no stream."""
    params = request.sampling_params
    return bool(
        params is not None
        and params.output_kind == RequestOutputKind.FINAL_ONLY
        and not params.stop
        and params.logprobs is None
        and params.prompt_logprobs is None
        and not request.resumable
    )

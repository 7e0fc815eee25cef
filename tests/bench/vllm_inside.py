"""Numbers of vLLM's scheduler, set and read while it runs, so that the rows of a table can share one engine process.

Each function but the last runs in the scheduler's process, handed to it by `LLM.collective_rpc` (VLLM_ALLOW_INSECURE_SERIALIZATION=1, benchmarks only);
the worker lives there too, so the scheduler is found up the stack. Nothing here changes what is computed.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

HELD = "_blocks_held_back"
COUNT = "_tokens_scheduled"
TRACE = "_kernels_traced"


def _core() -> Any:
    frame = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if hasattr(owner, "scheduler"):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    raise RuntimeError("no engine core up the stack: this runs only inside vLLM's own process")


def set_limits(worker: Any, sequences: int, step_tokens: int) -> tuple[int, int]:
    """At most what the engine was opened with; more sequences than before while it runs, fewer only when it is empty."""
    scheduler = _core().scheduler
    scheduler.max_num_running_reqs = sequences
    scheduler.max_num_scheduled_tokens = step_tokens
    return len(scheduler.running), len(scheduler.waiting)


def count_tokens(worker: Any) -> tuple[int, int, int]:
    """(tokens scheduled since the first call, steps, requests running now); the first call only starts the count."""
    scheduler = _core().scheduler
    if not hasattr(scheduler, COUNT):
        setattr(scheduler, COUNT, [0, 0])
        plain = scheduler.schedule

        def counted(*args: Any, **kwargs: Any) -> Any:
            output = plain(*args, **kwargs)
            told = getattr(scheduler, COUNT)
            told[0] += output.total_num_scheduled_tokens
            told[1] += 1
            return output

        scheduler.schedule = counted
    tokens, steps = getattr(scheduler, COUNT)
    return tokens, steps, len(scheduler.running)


def set_collector(worker: Any, on: bool) -> bool:
    """Python's garbage collector of the scheduler's process."""
    (gc.enable if on else gc.disable)()
    return gc.isenabled()


def set_ahead(worker: Any, steps: int, whole_answers: bool) -> int:
    """How far the scheduler runs ahead of the card, at most as far as the engine was opened for, and whether it tells each
    token or whole answers (see worker/engines/vllm_ahead.py). Only while nothing runs. Returns the steps."""
    core = _core()
    most = core.vllm_config.max_concurrent_batches
    assert 1 <= steps < most, f"opened for {most - 1} steps ahead"
    core.batch_queue_size = 1 + steps
    core.scheduler.holding = whole_answers
    return steps


def start_trace(worker: Any) -> None:
    """Kernels alone: nothing that the host does is recorded, so it runs about as fast as without."""
    from torch.profiler import ProfilerActivity, profile

    core = _core()
    setattr(core, TRACE, profile(activities=[ProfilerActivity.CUDA]))
    getattr(core, TRACE).start()


def stop_trace(worker: Any, path: str) -> None:
    trace = getattr(_core(), TRACE)
    trace.stop()
    trace.export_chrome_trace(path)


def cuda_calls(worker: Any) -> dict[str, int] | None:
    """Calls of vLLM's process that took memory or waited since it began, by kind; None where nobody counts (LD_PRELOAD)."""
    from fabric_pipelines.device import calls

    told = calls.read()
    if told is None:
        return None
    every = {kind: told.ours[kind] + told.engine[kind] for kind in calls.KINDS}
    return {**every, "unseen": told.unseen}


def stop_count(worker: Any) -> None:
    """The scheduler's own method again."""
    scheduler = _core().scheduler
    if hasattr(scheduler, COUNT):
        del scheduler.schedule
        delattr(scheduler, COUNT)


def cap_cache(worker: Any, blocks: int | None) -> int:
    """Empty the prefix cache, then hold back all blocks but `blocks` (None: none). Returns the blocks left for use."""
    scheduler = _core().scheduler
    pool = scheduler.kv_cache_manager.block_pool
    held = getattr(pool, HELD, [])
    if held:
        pool.free_blocks(held)
    setattr(pool, HELD, [])
    assert pool.reset_prefix_cache(), "requests are inside"
    if blocks is not None:
        setattr(pool, HELD, pool.get_new_blocks(pool.get_num_free_blocks() - blocks))
    return int(pool.get_num_free_blocks())


def ask(engine: Any, function: Any, *args: Any) -> Any:
    """The answer of one of the above from the scheduler's process."""
    (answer,) = engine.llm.collective_rpc(function, args=args)
    return answer

"""What exists, by workload: every asset, check, partition, sensor and schedule, each a declaration and one call.

Each workload has two assets. `submission` says what was enqueued, and its run ends there: the broker keeps the
work. `results` says what came back, and exists once the last task is retired.
"""

"""What exists, by workload: every asset, check, partition, sensor and schedule, each a declaration and one call.

Each workload has two assets. `submission` says what was enqueued, and its run ends there: the broker keeps the
work. `results` says what came back, and exists once the last task is retired.
"""

import warnings

from dagster_shared.utils.warnings import BetaWarning

# Of beta, in the release we pin, is one thing that we use on purpose. Every command that loads an asset would say so.
warnings.filterwarnings(
    "ignore",
    message=r"Function `observable_source_asset` is currently in beta",
    category=BetaWarning,
)

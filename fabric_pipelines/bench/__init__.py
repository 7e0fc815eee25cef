"""The measurements behind figures: each prints its own ceiling, spread and machine beside the number."""

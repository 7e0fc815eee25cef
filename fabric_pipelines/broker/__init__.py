"""The broker: one owner of the whole backlog. It understands tokens, leases shape-pure prefix-hot batches, and
retires a task only on a sink's confirmation. See docs/architecture.md.

`core` decides, `state` follows from facts, `owner` journals, `desk` and `server` face the world, `client` is
what everybody else imports.
"""

"""Durable queues that the broker is measured against, each through the smallest client that is fair to it."""

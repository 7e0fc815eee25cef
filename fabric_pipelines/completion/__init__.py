"""Computed tasks become durable results: pull from the broker, land, and only then retire."""

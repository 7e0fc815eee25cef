"""Fabric Pipelines: an offline inference fabric as a Dagster project. docs/architecture.md is the map."""

__version__ = "0.1.0"

"""The broker's bench over a journal on a disk; it ships with the crash bench."""

from fabric_pipelines.testing.disk_bench import DiskBench

__all__ = ["DiskBench"]

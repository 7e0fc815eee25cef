"""What people ask for, turned into tasks: synthetic data, probes, hidden states, embeddings.

A workload is pure: a request and a tokeniser become a submission and its task batches, and landed rows become
the table that is published. It reads nothing but package data, talks to no broker and no database, and
gives the same ids for the same request on every machine.
"""

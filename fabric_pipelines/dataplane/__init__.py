"""Where results become durable: Postgres (own launcher, migrations, COPY landing), the lake, shard facts.

Everything that speaks SQL or S3 is in this package, so that the rest of the fabric needs neither. The
interfaces are plain values: Arrow batches in, confirmations and tables out.
"""

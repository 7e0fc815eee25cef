"""With what: one ConfigurableResource an organ, each a thin client. Open, delegate, close; no logic.

Broker, worker, completion and Postgres are processes outside Dagster (a run is too short a life for an engine),
so a resource never owns one: it reaches it, and says in one sentence when it is not there.
"""

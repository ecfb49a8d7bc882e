"""Keep what is intended (rollouts, attempts, resources, workers) in SQLite or PostgreSQL, behind gRPC.

lifecycle.py holds the state machine, operations/ applies it on any engine (sqlite.py, postgres/), service.py and client.py are the two
ends of the wire. Observations (spans, logs) do not belong here.
"""

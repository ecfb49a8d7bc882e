"""Keep what is intended (rollouts, attempts, resources, workers) in SQLite or PostgreSQL, behind gRPC.

lifecycle.py says who may go from which state to which; operations/ does it on any engine; sqlite.py is one; service.py and client.py
are the two ends of the wire. What was observed (spans, logs) does not belong here.
"""

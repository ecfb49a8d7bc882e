"""The queue's calls, each one plain function of a Transaction: the same on every engine.

An operation reads rows, asks lifecycle.py what may become of them, and writes rows. It takes the request as protobuf and the time
as an argument (Unix seconds): it has no clock, does no other I/O, and knows nothing of gRPC.
"""

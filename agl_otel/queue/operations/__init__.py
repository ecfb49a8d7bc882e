"""The queue's calls, each a plain function of a Transaction: the same on every engine.

An operation reads rows, derives their new states by lifecycle.py, and writes rows. It takes the request as protobuf and the time as an
argument (Unix seconds): it reads no clock, does no other I/O, and does not depend on gRPC.
"""

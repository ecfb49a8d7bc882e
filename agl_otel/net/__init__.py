"""Listen and dial (HTTP, gRPC, TLS), and decide who may come in (tokens, keys), and with how much at a time."""

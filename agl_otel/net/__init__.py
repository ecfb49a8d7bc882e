"""Listen and connect (HTTP, gRPC, TLS), authenticate clients (tokens, keys), and limit request sizes."""

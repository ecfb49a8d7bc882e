"""The web service: where the services of a stack are, and REST over the store. Dashboard and Jaeger's APIs join it here."""

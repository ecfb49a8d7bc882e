"""The wire: queue.proto and the code generated from it (`make proto`)."""

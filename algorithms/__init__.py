"""Algorithms: enqueue rollouts, read their traces through an adapter, publish better resources."""

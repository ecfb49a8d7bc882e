"""Reinforcement learning by verl on Ray, with agents that run anywhere and are read from their traces."""

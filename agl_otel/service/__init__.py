"""Shared parts of services and commands: main, child processes, back-off, locks, port checks, logs, private files, framed files."""

"""Shared parts of services and commands: main, child processes, forks, back-off, locks, port checks, logs, private files, framed files."""

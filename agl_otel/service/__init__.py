"""Shared parts of services and commands: main, child processes and forks, back-off, locks, port checks, logs, private files, framed files."""

"""What every process of ours shares: main, child processes, back-off, locks, port checks, logs, private files, framed files."""

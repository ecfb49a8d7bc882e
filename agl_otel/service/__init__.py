"""What every process of ours shares: its main, child processes, logs, interpreter settings, private files, framed files."""

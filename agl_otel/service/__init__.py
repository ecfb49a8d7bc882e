"""What every process of ours shares: interpreter settings, logs, child processes, private files, framed files."""

"""Start the services of a stack as child processes and supervise them; back it up."""

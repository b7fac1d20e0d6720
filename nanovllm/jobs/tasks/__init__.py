"""What a job can do with its lines, a task a file."""

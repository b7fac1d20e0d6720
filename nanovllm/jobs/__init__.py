"""Files of prompts in, files of answers out, resumable: docs/jobs.md."""

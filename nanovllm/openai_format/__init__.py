"""Requests and answers as OpenAI writes them, for whoever reads or writes them, over the public API alone."""

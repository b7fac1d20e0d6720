"""`nanovllm serve`: an engine behind the routes of OpenAI's API. See docs/integrations.md."""

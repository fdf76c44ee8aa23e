"""pyserve: an OpenAI-compatible LLM server that parks a chat instead of ending it when the KV pool is full."""

__version__ = "0.1.0"

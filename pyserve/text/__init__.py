"""Text: tokenizers, detokenizing, stop strings, chat templates. Imports nothing of pyserve but `errors` and `types`."""

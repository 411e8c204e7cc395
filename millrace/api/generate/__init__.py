"""SGLang's native API: /generate, tokenize and detokenize, and the questions about the server."""

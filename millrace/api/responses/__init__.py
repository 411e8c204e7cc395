"""OpenAI's Responses and conversations: items in, items out, kept in a file between the turns."""

"""The engine: requests in, tokens out, one running batch on a paged cache."""

"""The workers of this router: a link to each, and what its stream's messages mean."""

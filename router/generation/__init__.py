"""What every API that generates text has in common: from a request's fields to a plan, and from tokens to a reply."""

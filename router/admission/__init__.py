"""Who is let in, when, and in which order: what stands between the HTTP face and the dispatch of legs."""

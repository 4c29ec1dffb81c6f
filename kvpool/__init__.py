"""The pooled KV store: one node per host, whose memory that host's workers share."""

"""Where workers and pool nodes are asked for: names in DNS, registrations in Redis."""

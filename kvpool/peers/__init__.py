"""The other nodes of a pool: what is fetched from them, sent to them and copied for them."""

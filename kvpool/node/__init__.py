"""One host's pool node: its memory, its disk, the ledger of what lies there, and the service that answers workers."""

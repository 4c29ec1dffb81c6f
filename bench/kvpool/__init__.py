"""Parts of a pool without a cluster: its directories, its nodes, its ledger on a trace."""

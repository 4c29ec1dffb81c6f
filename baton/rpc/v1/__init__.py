"""Generated from `proto/baton/rpc/v1/` by `make proto`; never edited by hand."""

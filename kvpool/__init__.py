"""The pooled KV store that spans the cluster. Its contract is `proto/baton/rpc/v1/pool.proto`; nothing serves it yet."""

"""The leaf every other package stands on: ids, errors, config, hashing, clock, telemetry, rpc."""

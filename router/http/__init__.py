"""HTTP that is alike for all endpoints: who may come in, bodies, errors, streams, the audit log."""

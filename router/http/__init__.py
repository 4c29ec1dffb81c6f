"""HTTP that is alike for all endpoints: authorisation and limits, bodies, errors, streams, the audit log."""

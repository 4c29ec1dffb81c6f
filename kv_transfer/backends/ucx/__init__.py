"""The backend `ucx`: `worker.py` says how it works."""

"""What every worker is: legs of routers over one engine, whatever its role.
What differs lies in prefill_worker and decode_worker.
"""

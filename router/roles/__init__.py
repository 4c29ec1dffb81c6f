"""Which workers prefill and which decode, as the load changes: a pure planner, and what has it look and act."""

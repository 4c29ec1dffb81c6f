"""What moves KV between processes, and the libraries that do nothing else."""

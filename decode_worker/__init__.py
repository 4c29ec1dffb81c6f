"""The half of a worker that receives the pages of prompts from other workers."""

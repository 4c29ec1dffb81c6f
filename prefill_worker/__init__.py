"""The half of a worker that sends the pages of computed prompts to other workers."""

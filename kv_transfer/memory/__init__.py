"""Where pages lie, how they are copied and hashed there, and how peers get into that memory."""

"""What can be seen of a router: its metrics, the spans of its requests, explanations of its decisions."""

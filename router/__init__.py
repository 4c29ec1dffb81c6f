"""Takes requests over HTTP, picks the workers for both legs, streams tokens back."""

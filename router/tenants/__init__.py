"""Who may come in, what each may use, and on what terms."""
